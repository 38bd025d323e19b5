"""Gives chunks their places in packs, and says when all of a pack's batch has come.

Chunks of one group share a pack as long as it has room and their batch goes on: what an engine stores in one step. All
ranks write the same chunks to the same places, so nothing about a pack has to be agreed on but its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.object.format.record import HEADER_BYTES
from hybridkv.tiers.object.names import tag_of


class ObjectSlot(Slot, frozen=True, array_like=True, gc=False):
    """A place in a pack. Its one extent begins at a number that no other slot of the index has."""

    pack: str = ""
    """The object's name, without its rank."""
    offset: int = 0
    """Of the chunk's header in the object."""


class PackPlace(NamedTuple):
    """Of a chunk, on every rank.

    Args:
        pack: the object's name, without its rank.
        offset: of the chunk's header in it.
        num_bytes: of the chunk.
        source: the prefix of the manifest that named it; empty where this engine stored it.
    """

    pack: str
    offset: int
    num_bytes: int
    source: bytes = b""

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + HEADER_BYTES + self.num_bytes

    def slot(self, number: int) -> ObjectSlot:
        """As `RemotePlace` says."""
        return ObjectSlot(((number, self.num_bytes),), self.pack, self.offset)


class Stored(NamedTuple):
    """A chunk that all ranks have stored.

    Args:
        key: of it.
        place: where.
        needs: what comes before it on its path.
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
    """All packs that are on their way.

    Args:
        pack_bytes: a pack is full when it has as many.
        new_name: names a pack.
    """

    def __init__(self, pack_bytes: int, new_name: Callable[[], str]) -> None:
        self._pack_bytes = pack_bytes
        self._new_name = new_name
        self._batch = _Batch()
        self._batches: dict[Key, _Batch] = {}
        """Of what is on its way."""
        self._open: dict[bytes, PackPlace] = {}
        """The last place of each group's open pack."""

    def place(self, key: Key, num_bytes: int, needs: Sequence[Key]) -> PackPlace:
        """Where a chunk is to lie."""
        tag = tag_of(key)
        last = self._open.get(tag)
        if last is None or last.end + num_bytes > self._pack_bytes:
            place = PackPlace(self._new_name(), 0, num_bytes)
        else:
            place = PackPlace(last.pack, last.end, num_bytes)
        self._open[tag] = place
        self._batch.open_keys[key] = (place, needs)
        self._batches[key] = self._batch
        return place

    def end_batch(self) -> list[Stored]:
        """What was placed since the last call travels together. What is to be named now, where nothing is open."""
        if not self._open:
            return []
        batch, self._batch, self._open = self._batch, _Batch(), {}
        batch.is_closed = True
        return [] if batch.open_keys else batch.stored

    def end(self, key: Key, *, is_stored: bool) -> list[Stored]:
        """A chunk has come, or will not. What is to be named now: all that came, at the end of its batch."""
        batch = self._batches.pop(key, None)
        if batch is None:
            return []
        place, needs = batch.open_keys.pop(key)
        if is_stored:
            batch.stored.append(Stored(key, place, needs))
        return batch.stored if batch.is_closed and not batch.open_keys else []

    def give_up(self) -> list[Stored]:
        """Nothing that is on its way is to be named. What has come of unfinished batches."""
        batches = {id(batch): batch for batch in (*self._batches.values(), self._batch)}
        self._batches.clear()
        self._batch, self._open = _Batch(), {}
        return [stored for batch in batches.values() for stored in batch.stored]
