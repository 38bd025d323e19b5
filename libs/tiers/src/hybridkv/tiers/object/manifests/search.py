"""Search for the last manifest of a path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from hybridkv.tiers.object.names import is_boundary

MAX_PROBES = 16
"""Manifests read in one round of a search for the last boundary with a manifest."""
MAX_TAIL_PROBES = 32
"""Manifests read after that boundary, where a path may have ended at any prefix."""

Found = TypeVar("Found")
Read = Callable[[Sequence[bytes]], Awaitable[Sequence[Found | None]]]
"""Reads the manifests of these prefixes; None for a prefix without one."""


async def find_last(
    prefixes: Sequence[bytes], read: Read[Found], boundary_every: int, max_probes: int, max_tail_probes: int
) -> tuple[bytes, Found] | None:
    """Find the last prefix of a path that has a manifest, and the manifest. Few rounds of reads.

    Manifests are at boundaries, which every reader can compute, and where a path ended. If a boundary has a manifest,
    the boundaries before it are taken to have one too, so each round cuts the search range. After the last boundary
    with a manifest, every prefix up to the next boundary is a candidate.

    Args:
        prefixes: prefixes of one path, in order.
        read: reads one round of manifests.
        boundary_every: on average one prefix of so many is a boundary.
        max_probes: reads of one round.
        max_tail_probes: candidates after the last boundary; the last ones count.
    """
    boundaries = [place for place, prefix in enumerate(prefixes) if is_boundary(prefix, boundary_every)]
    found: tuple[bytes, Found] | None = None
    low, high = -1, len(boundaries)
    while high - low > 1:
        probes = _spread(low + 1, high, max_probes)
        answers = await read([prefixes[boundaries[probe]] for probe in probes])
        for probe, answer in zip(probes, answers, strict=True):
            if answer is not None:
                low, found = probe, (prefixes[boundaries[probe]], answer)
        high = next((probe for probe in probes if probe > low), high)
    first = boundaries[low] + 1 if low >= 0 else 0
    stop = boundaries[high] if high < len(boundaries) else len(prefixes)
    tail = prefixes[max(first, stop - max_tail_probes) : stop]
    if tail:
        for prefix, answer in zip(tail, await read(tail), strict=True):
            found = (prefix, answer) if answer is not None else found
    return found


def _spread(low: int, high: int, number: int) -> list[int]:
    """Up to `number` evenly spaced integers of [low, high), the last included."""
    width = high - low
    if width <= number:
        return list(range(low, high))
    return [low + (step + 1) * width // number - 1 for step in range(number)]
