"""Copies one sequence of buffers over another, as one run of bytes. Slow and simple."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.tiers.contract import Failure, FailureReason


def copy_views(sources: Sequence[memoryview], destinations: Sequence[memoryview]) -> None:
    """Copy the concatenation of `sources` over that of `destinations`; both have the same total size."""
    remaining = iter(sources)
    source = memoryview(b"")
    for destination in destinations:
        filled = 0
        while filled < len(destination):
            while not source:
                source = next(remaining)
            num_bytes = min(len(source), len(destination) - filled)
            destination[filled : filled + num_bytes] = source[:num_bytes]
            source = source[num_bytes:]
            filled += num_bytes


def why_not_copy(sources: Sequence[memoryview], destinations: Sequence[memoryview]) -> Failure | None:
    """None when `copy_views` would succeed."""
    num_source_bytes = sum(map(len, sources))
    num_destination_bytes = sum(map(len, destinations))
    if num_source_bytes != num_destination_bytes:
        detail = f"cannot copy {num_source_bytes} bytes over {num_destination_bytes} bytes"
        return Failure(FailureReason.IO, detail)
    if any(view.readonly for view in destinations):
        return Failure(FailureReason.IO, "the destination is read-only")
    return None
