"""Checks of chunks in host memory before a load copies them: the setting `verify_ram`.

It concerns chunks that lie in the arena already. Chunks from secondary tiers are verified by their media before they
are sealed there, and chunks that leave the arena are compared with their seals, whatever this setting is.
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
"""With "sampled", one of this many chunks is read."""
MAX_COST = 0.05
"""Largest share of the speed of loads that the default gives to checksums."""


class RamChecks:
    """Checks of the chunks of loads. One thread at a time.

    The key and the extents of each slot are always compared. `verify_ram` selects the chunks that are also read and
    compared with their checksum. With "sampled" each load of a chunk reads it with a chance of 1 in 16, independent of
    other loads, so each chunk that is loaded again and again is read at some time.
    """

    def __init__(self, arena: SealedMemory, verify_ram: VerifyRam) -> None:
        self._arena = arena
        self._verify_ram = verify_ram
        self._load_numbers = itertools.count()

    def check_all(self, chunks: Sequence[tuple[Key, Slot]]) -> list[Failure | None]:
        """One result for each chunk of a load; None is success."""
        if self._verify_ram == "always":
            return self._arena.check_all(chunks)
        load_number = next(self._load_numbers)
        read = [number for number, chunk in enumerate(chunks) if self._must_read(*chunk, load_number)]
        failures: list[Failure | None] = [None] * len(chunks)
        for number, failure in zip(read, self._arena.check_all([chunks[number] for number in read]), strict=True):
            failures[number] = failure
        return failures

    def _must_read(self, key: Key, slot: Slot, load_number: int) -> bool:
        if not self._arena.is_sealed(key, slot):  # another key, other extents or no seal: `check_all` says which
            return True
        return self._verify_ram == "sampled" and xxhash.xxh3_64_intdigest(key, load_number) % SAMPLED_ONE_IN == 0


def checksum_cost(rates: CopyRates, *, is_overlapped: bool) -> float:
    """Share of the speed of loads that is lost if every chunk is read before it is copied, from 0 to 1.

    With `is_overlapped` checksums of one load are computed while another is copied, so loads that follow each other
    run at the slower of both speeds. Otherwise each load takes the time of both.
    """
    loads, checksums = rates.load_bytes_per_s, rates.checksum_bytes_per_s
    if not loads or not checksums:
        return 0.0
    return max(0.0, 1 - checksums / loads) if is_overlapped else loads / (loads + checksums)


def choose_verify_ram(configured: VerifyRam | None, rates: CopyRates | None, *, is_overlapped: bool) -> VerifyRam:
    """Returns the setting that applies, and logs it with the reason.

    Args:
        configured: the setting, None if it is not set.
        rates: the measured rates of a GPU, None on a CPU.
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
