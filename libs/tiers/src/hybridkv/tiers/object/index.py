"""Index of the chunks in a fleet's object store.

A chunk that was found or stored is offered for `believed_s`, and looked up again after that, because packs expire.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence

from hybridkv.tiers.contract import UNSPECIFIED, Extends, FailureReason, Key, LookupAnswer, Refusal
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.object.client import EpochChanged, LookupAnswered, News, ObjectClient
from hybridkv.tiers.object.format.record import LARGEST_KEY_BYTES
from hybridkv.tiers.object.names import pack_name
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import PackPlace, Packs, Stored
from hybridkv.tiers.remote import RemoteIndex

_BAD = frozenset({FailureReason.CHECKSUM, FailureReason.WRONG_KEY, FailureReason.MISSING})


class ObjectIndex(RemoteIndex[PackPlace]):
    """Scheduler's index of an object store.

    Args:
        client: lookup client. The index closes it.
        options: limits.
        clock: seconds; the times of answers use the same clock.
        clears_all: True if `clear` applies to the whole fleet.
    """

    def __init__(
        self, client: ObjectClient, options: ObjectOptions, clock: Callable[[], float], *, clears_all: bool = False
    ) -> None:
        super().__init__(client, options, clock)
        self._client = client
        to_live_s = options.time_to_live_s
        self._believed_s = options.believed_s if to_live_s is None else min(options.believed_s, to_live_s / 4)
        self._is_kept_alive = options.renewal_life_s is not None
        self._clears_all = clears_all
        self._packs = Packs(options.pack_bytes, self._new_pack)
        self._engine = uuid.uuid4().hex
        self._num_packs = 0

    def _new_pack(self) -> str:
        namespace = self._client.namespace
        assert namespace is not None, "`reserve` looked"
        self._num_packs += 1
        return pack_name(namespace, f"{self._engine}-{self._num_packs}")

    # Lookups.

    def _send(self, number: int, keys: Sequence[Key], until_s: float) -> bool:
        return self._client.ask(number, keys, until_s)

    def _on_event(self, event: News) -> None:
        if isinstance(event, EpochChanged):
            # All known chunks belong to the old epoch. Stores in progress are dropped.

            self._tracker.end_all()
            self._num_expired += self._forget_all()
        elif isinstance(event, LookupAnswered):
            self._on_found(event)
        else:
            self._end_lookup(event.request, LookupAnswer.TIMED_OUT, event.heard_s)

    def _on_found(self, found: LookupAnswered) -> None:
        places, wanted = found.places, self._tracker.open_keys(found.request)
        if not places.keys() <= wanted.keys():
            places = {key: place for key, place in places.items() if key in wanted}
        self._add_found(found.request, places, self._clock() + self._believed_s, found.heard_s)
        self._end_lookup(found.request, LookupAnswer.MISSING, found.heard_s)

    def _expires_s(self, place: PackPlace) -> float:
        return self._clock() + self._believed_s

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        keys = list(keys)
        super().touch(keys, extends)
        if self._is_kept_alive and keys:
            self._client.use(keys)

    # Storing.

    def end_batch(self) -> None:
        """As `BatchedIndex` says."""
        self._publish(self._packs.end_batch())

    def _new_place(self, key: Key, num_bytes: int, extends: Extends) -> PackPlace | Refusal:
        """Assign a place in a pack. The pack object exists once the media have stored it."""
        if not 0 < len(key) <= LARGEST_KEY_BYTES:
            raise TierProtocolError(f"reserve: expected a key of 1 to {LARGEST_KEY_BYTES} bytes, got {len(key)}")
        if self._client.namespace is None or not self._client.takes_objects:
            return Refusal.BUSY
        return self._packs.place(key, num_bytes, extends[-1:])

    def commit(self, key: Key) -> bool:
        is_committed = super().commit(key)
        self._publish(self._packs.end(key, is_stored=is_committed))
        return is_committed

    def abort(self, key: Key) -> None:
        super().abort(key)
        self._publish(self._packs.end(key, is_stored=False))

    def _publish(self, stored: Sequence[Stored]) -> None:
        if stored:
            self._client.publish(stored)

    # Withdrawing.

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        if reason in _BAD:
            place, entry = self._found.by_key.get(key), self._known.by_key.get(key)
            if place is None and entry is not None:
                place = entry.place
            if place is not None:
                self._client.retract(key, place)
        return super().invalidate(key, reason)

    def clear(self) -> int:
        """Invalidate every key of this index. The objects stay, since other engines use them. With `clears_all`, a new
        epoch hides them from all engines."""
        num_withdrawn = super().clear()
        self._client.clear(is_for_all=self._clears_all)
        return num_withdrawn

    def _forget_all(self) -> int:
        self._packs.give_up()
        return super()._forget_all()

    def close(self) -> None:
        if not self._known.is_closed:
            self._publish(self._packs.give_up())
        super().close()
