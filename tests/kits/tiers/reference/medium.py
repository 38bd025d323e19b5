"""The executable specification of `TierMedium`: a dict of byte strings.

Detects corruption by comparing with a second copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridkv.tiers.buffers import byte_views
from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, Slot, Ticket
from hybridkv.tiers.errors import TierProtocolError
from kits.tiers.copies import copy_views, why_not_copy

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ReferenceMedium:
    """A `TierMedium` for the slots of a `ReferenceIndex`: one byte string for each slot in use."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Key, Slot, bytearray, bytes]] = {}
        self._completions: list[Completion] = []
        self._is_closed = False

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        self._completions.append(Completion(ticket, self._store(key, slot, source)))

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        self._completions.append(Completion(ticket, self._load(key, slot, destination)))

    def poll(self) -> list[Completion]:
        completions, self._completions = self._completions, []
        return completions

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self._is_closed = True
        self._stored.clear()

    def forget(self, slot: Slot) -> None:
        """Loses the content of the slot."""
        self._stored.pop(slot.first_offset, None)

    def views(self, slot: Slot) -> list[memoryview]:
        stored = self._stored.get(slot.first_offset) if slot.extents else None
        if stored is None or stored[1] != slot:
            raise TierProtocolError(f"expected a slot that was stored, got {slot}")
        return [memoryview(stored[2])]

    def _store(self, key: Key, slot: Slot, source: Sequence[Buffer]) -> Failure | None:
        if self._is_closed:
            return Failure(FailureReason.CLOSED, "the medium was closed")
        if not slot.extents:
            return Failure(FailureReason.IO, "the slot has no extents")
        try:
            chunk = b"".join(byte_views(source))
        except (TypeError, ValueError, BufferError) as error:
            return Failure(FailureReason.IO, f"source: {error}")
        if len(chunk) != slot.num_bytes:
            return Failure(FailureReason.IO, f"cannot copy {len(chunk)} bytes over {slot.num_bytes} bytes")
        self._stored[slot.first_offset] = (key, slot, bytearray(chunk), chunk)
        return None

    def _load(self, key: Key, slot: Slot, destination: Sequence[Buffer]) -> Failure | None:
        if self._is_closed:
            return Failure(FailureReason.CLOSED, "the medium was closed")
        stored = self._stored.get(slot.first_offset) if slot.extents else None
        if stored is None:
            return Failure(FailureReason.MISSING, "nothing was stored in this slot")
        stored_key, _, present, original = stored
        if stored_key != key:
            return Failure(FailureReason.WRONG_KEY, f"expected {key.hex()}, got {stored_key.hex()}")
        if present != original or len(present) != slot.num_bytes:
            return Failure(FailureReason.CHECKSUM, f"the bytes of {key.hex()} are not those that were stored")
        try:
            destinations = byte_views(destination)
        except (TypeError, ValueError, BufferError) as error:
            return Failure(FailureReason.IO, f"destination: {error}")
        failure = why_not_copy([memoryview(present)], destinations)
        if failure is None:
            copy_views([memoryview(present)], destinations)
        return failure
