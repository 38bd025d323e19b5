"""Finds the last manifest on a path with few questions. Knows no store: whoever calls says how one is read.

Manifests stand at boundaries, which every reader can name, and where a path ended. Of boundaries those before one that
is there are taken to be there, too, so each round of questions leaves a small part of them; behind the last one every
prefix may have a manifest, up to the next boundary, which has none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from hybridkv.tiers.object.names import is_boundary

Found = TypeVar("Found")
Read = Callable[[Sequence[bytes]], Awaitable[Sequence[Found | None]]]
"""The manifests of these prefixes; None for what has none."""


async def find_last(
    prefixes: Sequence[bytes], read: Read[Found], boundary_every: int, max_probes: int, max_tail_probes: int
) -> tuple[bytes, Found] | None:
    """The last of these prefixes that has a manifest, and that.

    Args:
        prefixes: of one path, in order.
        read: asked for a round at a time.
        boundary_every: one of so many prefixes is a boundary.
        max_probes: in one round.
        max_tail_probes: behind the last boundary, the last ones.
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
    """So many of [low, high), or all of them; the last is among them."""
    width = high - low
    if width <= number:
        return list(range(low, high))
    return [low + (step + 1) * width // number - 1 for step in range(number)]
