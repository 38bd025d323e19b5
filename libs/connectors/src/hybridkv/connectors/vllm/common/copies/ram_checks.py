"""Checks of chunks in host memory before a load copies them: the setting `verify_ram`.

The setting selects chunks of loads. It does not change checks of moves: media verify chunks of secondary tiers before
the chunks are sealed in the arena, and chunks that are copied to secondary tiers are compared with their seals.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Literal

import xxhash

from hybridkv.connectors.vllm.common.copies.proof import CopyRates
from hybridkv.tiers import Failure, Key, SealedMemory, Slot

logger = logging.getLogger("vllm.hybridkv.worker")

VerifyRam = Literal["always", "sampled", "off"]

SAMPLED_ONE_IN = 16
"""With "sampled", a load reads each of its chunks with a chance of 1 in this number."""
MAX_COST = 0.05
"""If checksums of all chunks cost this share of the speed of loads or more, the default is "sampled"."""


class RamChecks:
    """Checks of the chunks of loads. Not thread-safe.

    The key and the extents of each slot are always compared. `verify_ram` selects the chunks that are also read and
    compared with their checksum. With "sampled", each load of a chunk reads the chunk with a chance of 1 in 16,
    independent of other loads. So a chunk with many loads is read by some of them.
    """

    def __init__(self, arena: SealedMemory, verify_ram: VerifyRam) -> None:
        self._arena = arena
        self._verify_ram = verify_ram
        self._load_numbers = itertools.count()

    def check_all(self, chunks: Sequence[tuple[Key, Slot]]) -> list[Failure | None]:
        """One result for each chunk of a load; None if the checks of the chunk found no failure."""
        if self._verify_ram == "always":
            return self._arena.check_all(chunks)
        load_number = next(self._load_numbers)
        read = [number for number, chunk in enumerate(chunks) if self._must_read(*chunk, load_number)]
        failures: list[Failure | None] = [None] * len(chunks)
        for number, failure in zip(read, self._arena.check_all([chunks[number] for number in read]), strict=True):
            failures[number] = failure
        return failures

    def _must_read(self, key: Key, slot: Slot, load_number: int) -> bool:
        if not self._arena.is_sealed(key, slot):  # another key, other extents or no seal: `check_all` returns the cause
            return True
        return self._verify_ram == "sampled" and xxhash.xxh3_64_intdigest(key, load_number) % SAMPLED_ONE_IN == 0


def checksum_cost(rates: CopyRates, *, is_overlapped: bool) -> float:
    """Share of the speed of loads, from 0 to 1, that is lost if every chunk is read before it is copied.

    With `is_overlapped`, checksums of one load are computed during the copy of another load, so consecutive loads have
    the lower of both speeds. Otherwise the time of a load is the sum of both times.
    """
    loads, checksums = rates.load_bytes_per_s, rates.checksum_bytes_per_s
    if not loads or not checksums:
        return 0.0
    return max(0.0, 1 - checksums / loads) if is_overlapped else loads / (loads + checksums)


def choose_verify_ram(configured: VerifyRam | None, rates: CopyRates | None, *, is_overlapped: bool) -> VerifyRam:
    """Returns the value of `verify_ram` that applies, and logs this value with the reason.

    Args:
        configured: the operator's setting; None if it is not set.
        rates: the measured rates of a GPU; None on a CPU.
        is_overlapped: see `checksum_cost`.
    """
    if rates is None:
        chosen, reason = configured or "always", "as configured"
    else:
        cost = checksum_cost(rates, is_overlapped=is_overlapped)
        chosen = configured or ("always" if cost < MAX_COST else "sampled")
        speeds = f"checksums {rates.checksum_bytes_per_s / 1e9:.1f} GB/s, loads {rates.load_bytes_per_s / 1e9:.1f} GB/s"
        origin = "as configured" if configured else "the default here"
        reason = f"{origin}; checksums of all chunks would slow loads by {100 * cost:.0f} % ({speeds})"
    if rates is not None or chosen != "always":
        logger.info('verify_ram is "%s", %s', chosen, reason)
    return chosen
