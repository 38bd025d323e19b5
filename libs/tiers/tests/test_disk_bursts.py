"""What comes in a burst comes back: of all that was offered the disk keeps what can be resumed, as far as it has room.

The measure is tokens that can be resumed from the disk alone over tokens that were offered and fit. Chunks, hits of
single keys and bytes say nothing of it: an end without its beginning counts for all three.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_bursts import Burst

from hybridkv.tiers.disk import DiskOptions, Fsync, InlineJanitor

KIB, MIB = 1 << 10, 1 << 20
SIZES = (128 * KIB, 40 * KIB)
"""Of a chunk of attention, and of a state."""
OPTIONS = DiskOptions(capacity_bytes=64 * MIB, fsync=Fsync.NONE, max_in_flight=2)
BURST = 100
"""Chunks, with a state each, that one prompt brings."""


def share(burst: Burst) -> float:
    return burst.resumable_tokens / burst.fitting_tokens


@pytest.mark.parametrize("is_paced", [False, True], ids=["burst", "paced"])
@pytest.mark.parametrize("has_thread", [False, True], ids=["inline", "thread"])
@pytest.mark.parametrize("num_prompts", [1, 3, 12])
def test_what_fits_can_be_resumed_whether_it_comes_at_once_or_not(
    tmp_path: Path, num_prompts: int, has_thread: bool, is_paced: bool
) -> None:
    janitor = None if has_thread else InlineJanitor()
    with Burst(tmp_path / "store", OPTIONS, 256 * MIB, SIZES, janitor) as burst:
        per_prompt = 3 * BURST // num_prompts
        for number in range(num_prompts):
            burst.offer(b"%d" % number, 0, per_prompt)
            if is_paced:
                burst.settle()
        burst.settle()
        assert share(burst) >= 0.98, (burst.cascades(), burst.far.used_bytes / burst.far.capacity_bytes)
