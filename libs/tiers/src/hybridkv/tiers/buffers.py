"""Views of sequences of buffers as bytes. Private to this library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hybridkv.tiers.contract import Failure, FailureReason, Slot

if TYPE_CHECKING:
    from typing_extensions import Buffer


def byte_views(buffers: Iterable[Buffer]) -> list[memoryview]:
    """View of each buffer as bytes. `TypeError` if an item is not a C-contiguous buffer."""
    return [memoryview(buffer).cast("B") for buffer in buffers]


def slot_views(slot: Slot, buffers: Sequence[Buffer], *, is_written: bool) -> list[memoryview] | Failure:
    """Byte views of the destination (`is_written`) or the source of a slot's bytes, without empty views. A `Failure` if
    the buffers do not fit the slot."""
    try:
        views = byte_views(buffers)
    except (TypeError, ValueError, BufferError) as error:
        return Failure(FailureReason.IO, f"{'destination' if is_written else 'source'}: {error}")
    if is_written and any(view.readonly for view in views):
        return Failure(FailureReason.IO, "the destination is read-only")
    num_bytes = sum(map(len, views))
    if not slot.extents or num_bytes != slot.num_bytes:
        return Failure(FailureReason.IO, f"cannot copy {slot.num_bytes} bytes over {num_bytes} bytes")
    return [view for view in views if len(view)]
