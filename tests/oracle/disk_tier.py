"""The connector with a disk below its RAM tier, and hooks that run between two steps."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import patience

from hybridkv.connectors.vllm import CONNECTOR
from hybridkv.tiers.disk import DiskMedium
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import TierStack
from kits.plain_ram_index import PlainRamIndex
from oracle.engine import OracleEngine
from oracle.mixes import Mix
from oracle.settings import Connector

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL, LARGE = 5, 500
"""Chunks of each group that fit into a RAM tier: too few for a scenario, and enough for any."""
DISK_TIMEOUT_S = patience.seconds(6.0)


def stacked(mix: Mix, directory: str | Path, load: str = "async", chunks: int = LARGE, **more: Any) -> Connector:
    # The smallest chunk takes a granule of 4 KiB.
    ram = {"type": "ram", "capacity": chunks * 4096 * (len(mix.groups) + 1)}
    disk = {"type": "disk", "path": str(directory), "capacity": "64MiB", "fsync": "none", "direct": False}
    # The oracle's model has no weights; only the name identifies it to another engine.
    config = {"chunk_tokens": mix.alignment_tokens, "tiers": [ram, disk], "load": load, "weights_digest": "oracle"}
    return Connector(CONNECTOR, config | more)


def stack_of(engine: OracleEngine) -> TierStack:
    return engine.scheduler_connector._scheduler._stack  # type: ignore[union-attr]


def forget(random: Random) -> Callable[[OracleEngine, int], None]:
    """A hook that sometimes evicts everything evictable from RAM.

    Chunks on their way to the disk are not evictable. So the hook waits for the disk one step before, however slow it
    is: otherwise nothing could be evicted on a busy machine, and nothing would be promoted from the disk.
    """
    is_due = False

    def before_step(engine: OracleEngine, step: int) -> None:
        nonlocal is_due
        near = stack_of(engine).primary
        assert isinstance(near, RamIndex | PlainRamIndex)
        if is_due:
            for key in near.eviction_order():
                near.invalidate(key)
        is_due = random.random() < 0.2
        if is_due:
            wait_for_disk(engine)

    return before_step


def wait_for_disk(engine: OracleEngine) -> None:
    """Waits until the disk has completed its operations. The next step polls them."""
    for runner in engine.runners:
        worker = runner.connector._worker  # type: ignore[union-attr]
        for medium in worker._mover.media.values():
            if isinstance(medium, DiskMedium):
                assert medium.drain(DISK_TIMEOUT_S), "the disk does not complete its operations"
