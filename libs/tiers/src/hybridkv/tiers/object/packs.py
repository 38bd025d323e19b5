"""Packs: assigns chunks to packs, and reports the chunks to publish when their batch is complete.

A batch is all chunks that an engine stores in one step. Chunks of one group and batch share a pack until it is full.
All ranks write the same chunks to the same offsets, so a pack has the same name on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.object.format.record import HEADER_BYTES
from hybridkv.tiers.object.names import tag_of


class ObjectSlot(Slot, frozen=True, array_like=True, gc=False):
    """Slot of a chunk in a pack. Its one extent begins at a number that is unique in the index."""

    pack: str = ""
    """Name of the pack, without the rank."""
    offset: int = 0
    """Offset of the chunk's header in the object, in bytes."""


class PackPlace(NamedTuple):
    """Place of a chunk, the same on every rank.

    Args:
        pack: name of the pack, without the rank.
        offset: offset of the chunk's header, in bytes.
        num_bytes: size of the chunk.
        source: prefix of the manifest that listed the chunk; empty if this engine stored the chunk.
    """

    pack: str
    offset: int
    num_bytes: int
    source: bytes = b""

    @property
    def end(self) -> int:
        """Offset after the chunk, in bytes."""
        return self.offset + HEADER_BYTES + self.num_bytes

    def slot(self, number: int) -> ObjectSlot:
        """See `RemotePlace`."""
        return ObjectSlot(((number, self.num_bytes),), self.pack, self.offset)


class Stored(NamedTuple):
    """A chunk that all ranks have stored.

    Args:
        key: its key.
        place: its place.
        needs: last key of the `extends` of the chunk, without which the chunk is useless; empty if there is none.
    """

    key: Key
    place: PackPlace
    needs: Sequence[Key]


@dataclass(slots=True)
class _Batch:
    open_keys: dict[Key, tuple[PackPlace, Sequence[Key]]] = field(default_factory=dict)
    stored: list[Stored] = field(default_factory=list)
    is_closed: bool = False


class Packs:
    """Packs in progress.

    Args:
        pack_bytes: size limit of a pack.
        new_name: returns the name of a new pack.
    """

    def __init__(self, pack_bytes: int, new_name: Callable[[], str]) -> None:
        self._pack_bytes = pack_bytes
        self._new_name = new_name
        self._batch = _Batch()
        self._batches: dict[Key, _Batch] = {}
        """Batch of each chunk that is not stored yet."""
        self._open: dict[bytes, PackPlace] = {}
        """Last place in the open pack of each group, by tag."""

    def needs_pack(self, key: Key, num_bytes: int) -> bool:
        """True if this chunk would begin a new pack."""
        last = self._open.get(tag_of(key))
        return last is None or last.end + num_bytes > self._pack_bytes

    def place(self, key: Key, num_bytes: int, needs: Sequence[Key]) -> PackPlace:
        """Assign a place to a chunk."""
        tag = tag_of(key)
        if self.needs_pack(key, num_bytes):
            place = PackPlace(self._new_name(), 0, num_bytes)
        else:
            last = self._open[tag]
            place = PackPlace(last.pack, last.end, num_bytes)
        self._open[tag] = place
        self._batch.open_keys[key] = (place, needs)
        self._batches[key] = self._batch
        return place

    def end_batch(self) -> list[Stored]:
        """End the current batch. Returns its stored chunks if all its stores have ended, else an empty list."""
        if not self._open:
            return []
        batch, self._batch, self._open = self._batch, _Batch(), {}
        batch.is_closed = True
        return [] if batch.open_keys else batch.stored

    def end(self, key: Key, *, is_stored: bool) -> list[Stored]:
        """Record the end of a store. After the last store of an ended batch, returns the stored chunks of the batch,
        else an empty list."""
        batch = self._batches.pop(key, None)
        if batch is None:
            return []
        place, needs = batch.open_keys.pop(key)
        if is_stored:
            batch.stored.append(Stored(key, place, needs))
        return batch.stored if batch.is_closed and not batch.open_keys else []

    def give_up(self) -> list[Stored]:
        """Drop all stores in progress. Returns the stored chunks of unfinished batches."""
        batches = {id(batch): batch for batch in (*self._batches.values(), self._batch)}
        self._batches.clear()
        self._batch, self._open = _Batch(), {}
        return [stored for batch in batches.values() for stored in batch.stored]
