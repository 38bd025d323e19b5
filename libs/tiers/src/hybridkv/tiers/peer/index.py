"""Index of the chunks that peers hold.

A lookup is one message to each ready listed peer, for any number of keys. A chunk is read from the first peer that
answers with its key. The index stores no chunk at a peer: it refuses every reservation.

A hinted lookup is sent to the hinted peers first. Keys that were not found are sent to the listed peers when all hinted
peers have answered, or after half of the time to the deadline. A right hint costs one message to each hinted peer,
however many peers are listed. A wrong hint costs one more round trip, or half of the time to the deadline if a hinted
peer does not answer. A hinted peer that has not answered by then does not keep the lookup open, and does not affect the
breaker of the tier, because clients choose the hints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hybridkv.tiers.contract import Extends, Key, LookupAnswer, Refusal
from hybridkv.tiers.peer.client import ConnectionLost, PeerAnswer, PeerLookupClient
from hybridkv.tiers.peer.options import PeerOptions
from hybridkv.tiers.peer.places import Address, PeerId, PeerPlace, to_tier_slot
from hybridkv.tiers.remote import RemoteEntry, RemoteIndex

_HINTED_SHARE = 0.5
"""Share of the time of a hinted lookup after which its open keys are sent to the listed peers."""


@dataclass(slots=True)
class _PeerLookup:
    waiting: dict[PeerId, tuple[Key, ...]]
    """Peers that have not answered, and the keys that were sent to each."""
    forget_at_s: float
    """Time after which the lookup may be forgotten: `forget_after_s` after its deadline."""
    hinted: frozenset[PeerId] = frozenset()
    """Hinted peers to which the lookup was sent."""
    others_due_s: float = math.inf
    """Time at which a hinted lookup is sent to the listed peers; infinite after that."""
    is_to_listed: bool = True
    """True if the lookup was sent to peers outside `hinted`. If False and no peer answers, the breaker of the tier
    does not count a timeout."""
    has_answer: bool = False
    has_listed_answer: bool = False
    """True if a peer outside `hinted` has answered. If False, keys that were not found are not remembered as missing.
    """
    no_longer_awaited: dict[PeerId, tuple[Key, ...]] = field(default_factory=dict)
    """Hinted peers for which the lookup does not wait any more, and the keys that were sent to each. A late answer is
    still handled, because the peer has granted leases."""


class PeerIndex(RemoteIndex[PeerPlace]):
    """The scheduler's half of the peer tier.

    Args:
        client: sends lookups to peers. The index closes it.
        options: bounds.
        clock: seconds; the times of answers use the same clock.
    """

    def __init__(self, client: PeerLookupClient, options: PeerOptions, clock: Callable[[], float]) -> None:
        super().__init__(client, options, clock)
        self._client = client
        self._hint_backoff_s = options.hint_backoff_s
        self._lookups: dict[int, _PeerLookup] = {}
        """Lookups that at least one peer has not answered."""
        self._hinted: tuple[PeerId, ...] = ()
        """Hinted peers of the lookup that is being started."""
        self._starting_others_due_s = math.inf
        """`others_due_s` of the lookup that is being started."""
        self._next_others_due_s = math.inf
        """Next time at which a hinted lookup may be due for the listed peers."""
        self._backoff_until_s: dict[PeerId, float] = {}
        """Peers that did not answer a hinted lookup in time, and the time until which they get no hinted lookup."""

    # Lookups.

    def start_lookup_at(self, addresses: Sequence[Address], keys: Iterable[Key], deadline_s: float) -> None:
        """`start_lookup` with a hint: the lookup is sent to these peers first. They need not be listed."""
        now_s = self._clock()
        peers = dict.fromkeys(map(self._client.peer_at, addresses))
        self._hinted = tuple(peer for peer in peers if self._backoff_until_s.get(peer, now_s) <= now_s)
        self._starting_others_due_s = now_s + _HINTED_SHARE * max(0.0, deadline_s - now_s)
        try:
            self.start_lookup(keys, deadline_s)
        finally:
            self._hinted = ()

    def _send(self, number: int, keys: Sequence[Key], until_s: float) -> bool:
        for old in [old for old, lookup in self._lookups.items() if lookup.forget_at_s <= self._clock()]:
            if not self._tracker.open_keys(old):
                del self._lookups[old]
        sent = tuple(keys)
        send = self._client.send_hinted_lookup
        hinted = [peer for peer in self._hinted if send(peer, number, sent, self._hinted)]
        if hinted:
            lookup = _PeerLookup(
                dict.fromkeys(hinted, sent), until_s, frozenset(hinted), self._starting_others_due_s, False
            )
            self._next_others_due_s = min(self._next_others_due_s, self._starting_others_due_s)
        else:
            lookup = _PeerLookup({}, until_s)
            self._send_to_listed(number, lookup, sent)
        if lookup.waiting:
            self._lookups[number] = lookup
        return bool(lookup.waiting)

    def _send_to_listed(self, number: int, lookup: _PeerLookup, keys: tuple[Key, ...]) -> None:
        """Send a lookup of these keys to all ready listed peers that are not in `lookup.hinted`."""
        lookup.others_due_s = math.inf
        for peer in self._client.ready() if keys else ():
            if peer not in lookup.hinted and self._client.send_lookup(peer, number, keys):
                lookup.waiting[peer] = keys
                lookup.is_to_listed = True
        if lookup.hinted:
            self._tracker.resent(number, self._clock())

    def _poll_events(self) -> None:
        while self._events:
            self._on_event(self._events.popleft())
        # Before the base class handles timeouts: a hinted peer without an answer does not count as a timeout.
        if self._next_others_due_s < math.inf and self._next_others_due_s <= (now_s := self._clock()):
            for number, lookup in list(self._lookups.items()):
                if lookup.others_due_s <= now_s:
                    self._pass_over_hint(number, lookup, now_s)
            self._next_others_due_s = min((lookup.others_due_s for lookup in self._lookups.values()), default=math.inf)
        super()._poll_events()

    def _pass_over_hint(self, number: int, lookup: _PeerLookup, now_s: float) -> None:
        """End the wait of a lookup for its hinted peers, and send its open keys to the listed peers."""
        for peer in list(lookup.waiting):
            keys = lookup.waiting.pop(peer)
            if not self._client.withdraw_lookup(peer, number):
                lookup.no_longer_awaited[peer] = keys
                live = {name: until_s for name, until_s in self._backoff_until_s.items() if until_s > now_s}
                self._backoff_until_s = live | {peer: now_s + self._hint_backoff_s}
        # A lookup that has no time left is not sent to the listed peers.
        has_time = now_s < lookup.forget_at_s - self._options.forget_after_s
        self._send_to_listed(number, lookup, tuple(self._tracker.open_keys(number)) if has_time else ())
        if not lookup.waiting:
            self._end(number, lookup, now_s)

    def _on_event(self, event: PeerAnswer | ConnectionLost) -> None:
        if isinstance(event, PeerAnswer):
            self._on_answered(event)
        else:
            self._on_lost(event)

    def _on_answered(self, answer: PeerAnswer) -> None:
        number, peer = answer.request, answer.peer
        lookup = self._lookups.get(number)
        keys = None if lookup is None else lookup.waiting.get(peer) or lookup.no_longer_awaited.get(peer)
        if lookup is None or keys is None:
            return
        # A chunk is offered in the first half of its lease. The second half is for a load.
        until_s = answer.answered_s + answer.lease_s / 2
        slots = {key: slot for key, slot in zip(keys, answer.slots, strict=False) if slot is not None}
        wanted = self._tracker.open_keys(number)
        places = {
            key: PeerPlace(to_tier_slot(peer, slot), peer, slot.num_bytes, until_s)
            for key, slot in slots.items()
            if key in wanted
        }
        added = self._add_found(number, places, until_s, answer.answered_s)
        self._end_leases(peer, [key for key in slots if key not in added])
        lookup.has_answer = True
        lookup.has_listed_answer |= peer not in lookup.hinted
        self._end_waiting(number, lookup, peer, answer.answered_s)

    def _end_waiting(self, number: int, lookup: _PeerLookup, peer: PeerId, answered_s: float) -> None:
        """End the wait of a lookup for one peer, which has answered or is lost. After the last hinted peer, the lookup
        is sent to the listed peers. After the last peer, the lookup ends."""
        if lookup.no_longer_awaited.pop(peer, None):
            self._forget_ended(number, lookup)
            return
        del lookup.waiting[peer]
        if not lookup.waiting and lookup.others_due_s < math.inf:
            self._send_to_listed(number, lookup, tuple(self._tracker.open_keys(number)))
        if not lookup.waiting:
            self._end(number, lookup, answered_s)

    def _end(self, number: int, lookup: _PeerLookup, answered_s: float) -> None:
        self._forget_ended(number, lookup)
        keys = list(self._tracker.open_keys(number))
        if not lookup.has_answer and not lookup.is_to_listed:
            for key in keys:
                self._tracker.withdraw(key)
            self._tracker.not_sent(len(keys))
        self._end_lookup(number, LookupAnswer.MISSING if lookup.has_answer else LookupAnswer.TIMED_OUT, answered_s)
        if not lookup.has_listed_answer:
            # Another request may have a better hint.
            self._tracker.forget_missing(keys)

    def _forget_ended(self, number: int, lookup: _PeerLookup) -> None:
        """Forget a lookup that has ended, unless a late answer may come."""
        if not lookup.waiting and not lookup.no_longer_awaited:
            del self._lookups[number]

    def _on_lost(self, loss: ConnectionLost) -> None:
        for number, lookup in list(self._lookups.items()):
            if loss.peer in lookup.waiting or loss.peer in lookup.no_longer_awaited:
                self._end_waiting(number, lookup, loss.peer, loss.answered_s)
        if not loss.was_ready:
            return  # every chunk of an earlier connection was withdrawn when that one ended
        for key in [key for key, place in self._found.by_key.items() if place.peer == loss.peer]:
            self._take_over(key)
        for entry in [entry for entry in self._ledger.by_key.values() if entry.place.peer == loss.peer]:
            entry.place = entry.place._replace(is_leased=False)
            self._num_expired += self._ledger.withdraw(entry.key) is not None

    # Leases. A peer keeps a chunk until this engine has read or dropped it, or until the lease expires. This engine
    # offers the chunk in the first half of the lease.

    def _expires_s(self, place: PeerPlace) -> float:
        return place.until_s

    def _on_forgotten(self, places: Mapping[Key, PeerPlace]) -> None:
        self._release(places.items())

    def _on_unused(self, entries: Sequence[RemoteEntry[PeerPlace]]) -> None:
        self._release([(entry.key, entry.place) for entry in entries])
        for entry in entries:
            entry.place = entry.place._replace(is_leased=False)

    def _release(self, places: Iterable[tuple[Key, PeerPlace]]) -> None:
        ended: dict[PeerId, list[Key]] = {}
        for key, place in places:
            if place.is_leased:
                ended.setdefault(place.peer, []).append(key)
        for peer, keys in ended.items():
            self._end_leases(peer, keys)

    def _end_leases(self, peer: PeerId, keys: Sequence[Key]) -> None:
        if keys:
            self._client.end_leases(peer, keys)

    # Storing.

    def _new_place(self, key: Key, num_bytes: int, extends: Extends) -> Refusal:
        """TOO_LARGE: no chunk is stored at peers, and retrying is pointless."""
        return Refusal.TOO_LARGE
