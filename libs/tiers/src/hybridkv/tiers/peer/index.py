"""Index of the chunks that peers hold.

A lookup is one message to each ready listed peer, whatever the number of keys. A key is read from the first peer that
answers with it. Nothing is stored at a peer: a reservation is refused.

A hinted lookup goes to the hinted peers alone. Keys that are not found go to the other peers when all hinted peers have
answered, or at half of the time. So a right hint costs one message, whatever the number of peers, and a wrong one costs
one round trip. A hinted peer that does not answer by then does not keep the lookup open and does not affect the breaker
of the tier, since a client names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hybridkv.tiers.contract import Extends, Key, LookupAnswer, Refusal
from hybridkv.tiers.peer.client import ConnectionLost, PeerAnswer, PeerClient
from hybridkv.tiers.peer.options import PeerOptions
from hybridkv.tiers.peer.places import Address, PeerId, PeerPlace, to_tier_slot
from hybridkv.tiers.remote import RemoteEntry, RemoteIndex

_HINTED_SHARE = 0.5
"""Share of the time of a hinted lookup after which the other peers are sent its open keys."""


@dataclass(slots=True)
class _PeerLookup:
    waiting: dict[PeerId, tuple[Key, ...]]
    """Peers that have not answered, and the keys that each was sent."""
    until_s: float
    """Its leases have expired by then."""
    hinted: frozenset[PeerId] = frozenset()
    """Hinted peers that it was sent to."""
    others_due_s: float = math.inf
    """Time at which it is sent to the other peers; infinite if that was done."""
    is_to_listed: bool = True
    """It was sent to peers that no hint names. Only then a missing answer affects the breaker of the tier."""
    has_answer: bool = False
    has_listed_answer: bool = False
    """A peer that no hint names has answered. Only then the keys without a peer are remembered as missing."""
    passed_over: dict[PeerId, tuple[Key, ...]] = field(default_factory=dict)
    """Hinted peers that it does not wait for any more, and the keys that each was sent. A late answer has leases."""


class PeerIndex(RemoteIndex[PeerPlace]):
    """The scheduler's half of the peer tier.

    Args:
        client: sends lookups to peers. The index closes it.
        options: bounds.
        clock: seconds; the times of answers use the same clock.
    """

    def __init__(self, client: PeerClient, options: PeerOptions, clock: Callable[[], float]) -> None:
        super().__init__(client, options, clock)
        self._client = client
        self._hint_backoff_s = options.hint_backoff_s
        self._lookups: dict[int, _PeerLookup] = {}
        """Lookups that at least one peer has not answered."""
        self._hinted: tuple[PeerId, ...] = ()
        """Peers that the next lookup goes to first, and when it goes to the others."""
        self._others_due_s = math.inf
        self._due_s = math.inf
        """Next time at which a hinted lookup is sent to the others."""
        self._backoff_until_s: dict[PeerId, float] = {}
        """Peers that left a hinted lookup unanswered."""

    # Lookups.

    def start_lookup_at(self, addresses: Sequence[Address], keys: Iterable[Key], deadline_s: float) -> None:
        """`start_lookup` with a hint: these peers are sent the lookup first. They need not be listed."""
        now_s = self._clock()
        peers = dict.fromkeys(map(self._client.peer_at, addresses))
        self._hinted = tuple(peer for peer in peers if self._backoff_until_s.get(peer, now_s) <= now_s)
        self._others_due_s = now_s + _HINTED_SHARE * max(0.0, deadline_s - now_s)
        try:
            self.start_lookup(keys, deadline_s)
        finally:
            self._hinted = ()

    def _send(self, number: int, keys: Sequence[Key], until_s: float) -> bool:
        for old in [old for old, lookup in self._lookups.items() if lookup.until_s <= self._clock()]:
            if not self._tracker.open_keys(old):
                del self._lookups[old]
        sent = tuple(keys)
        send = self._client.send_hinted_lookup
        hinted = [peer for peer in self._hinted if send(peer, number, sent, self._hinted)]
        if hinted:
            lookup = _PeerLookup(dict.fromkeys(hinted, sent), until_s, frozenset(hinted), self._others_due_s, False)
            self._due_s = min(self._due_s, self._others_due_s)
        else:
            lookup = _PeerLookup({}, until_s)
            self._send_to_listed(number, lookup, sent)
        if lookup.waiting:
            self._lookups[number] = lookup
        return bool(lookup.waiting)

    def _send_to_listed(self, number: int, lookup: _PeerLookup, keys: tuple[Key, ...]) -> None:
        """Send keys to all listed peers that no hint named."""
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
        # Before the base handles time-outs: a hinted peer without an answer is none.
        if self._due_s < math.inf and self._due_s <= (now_s := self._clock()):
            for number, lookup in list(self._lookups.items()):
                if lookup.others_due_s <= now_s:
                    self._pass_over_hint(number, lookup, now_s)
            self._due_s = min((lookup.others_due_s for lookup in self._lookups.values()), default=math.inf)
        super()._poll_events()

    def _pass_over_hint(self, number: int, lookup: _PeerLookup, now_s: float) -> None:
        """Half of the time of a hinted lookup is over. Its hinted peers are not waited for any more."""
        for peer in list(lookup.waiting):
            keys = lookup.waiting.pop(peer)
            if not self._client.withdraw_lookup(peer, number):
                lookup.passed_over[peer] = keys
                live = {name: until_s for name, until_s in self._backoff_until_s.items() if until_s > now_s}
                self._backoff_until_s = live | {peer: now_s + self._hint_backoff_s}
        # Listed peers are not sent a lookup that has no time left.
        has_time = now_s < lookup.until_s - self._options.forget_after_s
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
        keys = None if lookup is None else lookup.waiting.get(peer) or lookup.passed_over.get(peer)
        if lookup is None or keys is None:
            return
        # The second half of the lease is for loading it.
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
        """A peer will not answer this lookup any more. After the last peer, keys that no peer holds are MISSING."""
        if lookup.passed_over.pop(peer, None):
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
        """Forget a lookup that has ended and that no late answer is expected for."""
        if not lookup.waiting and not lookup.passed_over:
            del self._lookups[number]

    def _on_lost(self, loss: ConnectionLost) -> None:
        for number, lookup in list(self._lookups.items()):
            if loss.peer in lookup.waiting or loss.peer in lookup.passed_over:
                self._end_waiting(number, lookup, loss.peer, loss.answered_s)
        if not loss.was_ready:
            return  # every chunk of an earlier connection was withdrawn when that one ended
        for key in [key for key, place in self._found.by_key.items() if place.peer == loss.peer]:
            self._take_over(key)
        for entry in [entry for entry in self._known.by_key.values() if entry.place.peer == loss.peer]:
            entry.place = entry.place._replace(is_leased=False)
            self._num_expired += self._known.withdraw(entry.key) is not None

    # Leases. A peer keeps a chunk until this engine has read it, or will not read it.

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
        """Nothing is stored at peers. TOO_LARGE, since retrying is pointless."""
        return Refusal.TOO_LARGE
