"""Index of the chunks in a fleet's object store.

A chunk that was found or stored is offered for `found_s`, and looked up again after that, because packs expire.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence

from hybridkv.tiers.contract import UNSPECIFIED, Extends, FailureReason, Key, LookupAnswer, Refusal
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.object.client import ClientEvent, EpochChanged, LookupAnswered, StoreCounts
from hybridkv.tiers.object.format.record import LARGEST_KEY_BYTES
from hybridkv.tiers.object.manifests.manifest_store import ManifestStore
from hybridkv.tiers.object.names import pack_name
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import PackPlace, Packs, Stored
from hybridkv.tiers.object.store_checks import StoreChecks
from hybridkv.tiers.remote import RemoteIndex

_BAD = frozenset({FailureReason.CHECKSUM, FailureReason.WRONG_KEY, FailureReason.MISSING})


class _Budget:
    """Limit of an average rate, with bursts of one second. One call may spend more than is left.

    Args:
        per_s: the rate; None: no limit.
        clock: seconds.
    """

    def __init__(self, per_s: float | None, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = per_s or 0.0
        self._at_s = clock()

    def is_left(self) -> bool:
        """True if the budget is not used up."""
        if self._per_s is None:
            return True
        now_s = self._clock()
        self._left = min(self._per_s, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return self._left > 0

    def spend(self, amount: float) -> None:
        """Subtract from the budget."""
        if self._per_s is not None:
            self._left -= amount


class ObjectIndex(RemoteIndex[PackPlace]):
    """Scheduler's index of an object store.

    Args:
        client: lookup client. The index closes it.
        options: limits.
        clock: seconds; the times of answers use the same clock.
        clears_all: True if `clear` applies to the whole fleet.
    """

    def __init__(
        self, client: ManifestStore, options: ObjectOptions, clock: Callable[[], float], *, clears_all: bool = False
    ) -> None:
        super().__init__(client, options, clock)
        self._client = client
        to_live_s = options.time_to_live_s
        self._found_s = options.found_s if to_live_s is None else min(options.found_s, to_live_s / 4)
        self._is_kept_alive = options.renewal_life_s is not None
        self._clears_all = clears_all
        self._packs = Packs(options.pack_bytes, self._new_pack)
        self._engine = uuid.uuid4().hex
        self._num_packs = 0
        self._checks = StoreChecks(self._tracker, self._start_check, options.check_timeout_s, clock)
        self._is_checking = False
        """True while `_send` is called for a lookup before a store."""
        self._bytes_budget = _Budget(options.store_bytes_per_s, clock)
        self._packs_budget = _Budget(options.store_packs_per_s, clock)

    def _new_pack(self) -> str:
        namespace = self._client.namespace
        assert namespace is not None, "`reserve` looked"
        self._num_packs += 1
        return pack_name(namespace, f"{self._engine}-{self._num_packs}")

    # Lookups.

    @property
    def _is_urgent(self) -> bool:
        return not self._is_checking

    def _send(self, number: int, keys: Sequence[Key], until_s: float) -> bool:
        return self._client.send_lookup(number, keys, until_s, is_for_store=self._is_checking)

    def _on_event(self, event: ClientEvent) -> None:
        if isinstance(event, EpochChanged):
            # All known chunks belong to the old epoch. Stores in progress are dropped.
            self._tracker.end_all()
            self._tracker.clear()
            self._num_expired += self._forget_all()
        elif isinstance(event, LookupAnswered):
            self._on_found(event)
        else:
            self._end_lookup(event.request, LookupAnswer.TIMED_OUT, event.answered_s)

    def _on_found(self, found: LookupAnswered) -> None:
        places, wanted = found.places, self._tracker.open_keys(found.request)
        if not places.keys() <= wanted.keys():
            places = {key: place for key, place in places.items() if key in wanted}
        self._add_found(found.request, places, self._clock() + self._found_s, found.answered_s)
        self._end_lookup(found.request, LookupAnswer.MISSING, found.answered_s)

    def _expires_s(self, place: PackPlace) -> float:
        return self._clock() + self._found_s

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        keys = list(keys)
        super().touch(keys, extends)
        if extends:
            path = keys[::-1]
            self._checks.announce(path)
            self._poll_events()
            if not self._expired.keys().isdisjoint(path):
                # No request looks these chunks up while host memory has them, and the store may have lost them.
                self.prepare_stores([key for key in path if key in self._expired])
        if self._is_kept_alive and keys:
            self._client.use(keys)

    # Storing.

    def prepare_stores(self, keys: Sequence[Key]) -> None:
        """See `BatchedIndex`. Does nothing while no chunk can be stored."""
        if self._is_storable() and self._bytes_budget.is_left() and self._packs_budget.is_left():
            self._poll_events()
            self._checks.prepare(keys)

    def _start_check(self, keys: Sequence[Key], deadline_s: float) -> None:
        self._is_checking = True
        try:
            self.start_lookup(keys, deadline_s)
        finally:
            self._is_checking = False

    def _is_storable(self) -> bool:
        return self._client.namespace is not None and self._client.takes_objects

    def end_batch(self) -> None:
        """See `BatchedIndex`."""
        self._publish(self._packs.end_batch())

    def _new_place(self, key: Key, num_bytes: int, extends: Extends) -> PackPlace | Refusal:
        """Assign a place in a pack. The pack object exists once the media have stored it."""
        if not 0 < len(key) <= LARGEST_KEY_BYTES:
            raise TierProtocolError(f"reserve: expected a key of 1 to {LARGEST_KEY_BYTES} bytes, got {len(key)}")
        if not self._is_storable():
            return Refusal.BUSY
        needs_pack = self._packs.needs_pack(key, num_bytes)
        if not self._bytes_budget.is_left() or (needs_pack and not self._packs_budget.is_left()):
            return Refusal.BUSY
        may_store = self._checks.may_store(key)
        if key in self._found.by_key:  # the call above may have polled a late answer
            return Refusal.PRESENT
        if not may_store:
            return Refusal.BUSY
        place = self._packs.place(key, num_bytes, extends[-1:])
        self._bytes_budget.spend(num_bytes)
        self._packs_budget.spend(needs_pack)
        self._checks.forget(key)
        return place

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

    def take_store_counts(self) -> StoreCounts:
        """Counts of the store since the last call."""
        return self._client.take_counts()

    # Withdrawing.

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        if reason in _BAD:
            place, entry = self._found.by_key.get(key), self._ledger.by_key.get(key)
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
        self._checks.clear()
        self._packs.give_up()
        return super()._forget_all()

    def close(self) -> None:
        if not self._ledger.is_closed:
            self._publish(self._packs.give_up())
        super().close()
