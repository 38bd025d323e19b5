"""Index of the chunks that peers hold.

A lookup is one message to each ready peer, whatever the number of keys. A key is read from the first peer that answers
with it. Nothing is stored at a peer: a reservation is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybridkv.tiers.contract import Extends, Key, LookupAnswer, Refusal
from hybridkv.tiers.peer.client import ConnectionLost, PeerAnswer, PeerClient
from hybridkv.tiers.peer.options import PeerOptions
from hybridkv.tiers.peer.places import PeerPlace, to_tier_slot
from hybridkv.tiers.remote import RemoteEntry, RemoteIndex


@dataclass(slots=True)
class _PeerLookup:
    keys: tuple[Key, ...]
    waiting: set[int]
    """Peers that have not answered."""
    until_s: float
    """Its leases have expired by then."""
    has_answer: bool = False


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
        self._lookups: dict[int, _PeerLookup] = {}
        """Lookups that at least one peer has not answered."""

    # Lookups.

    def _send(self, number: int, keys: Sequence[Key], until_s: float) -> bool:
        for old in [old for old, lookup in self._lookups.items() if lookup.until_s <= self._clock()]:
            if not self._tracker.open_keys(old):
                del self._lookups[old]
        peers = {peer for peer in self._client.ready() if self._client.send_lookup(peer, number, keys)}
        if peers:
            self._lookups[number] = _PeerLookup(tuple(keys), peers, until_s)
        return bool(peers)

    def _on_event(self, event: PeerAnswer | ConnectionLost) -> None:
        if isinstance(event, PeerAnswer):
            self._on_answered(event)
        else:
            self._on_lost(event)

    def _on_answered(self, answer: PeerAnswer) -> None:
        number, peer = answer.request, answer.peer
        lookup = self._lookups.get(number)
        if lookup is None or peer not in lookup.waiting:
            return
        # The second half of the lease is for loading it.
        until_s = answer.answered_s + answer.lease_s / 2
        slots = {key: slot for key, slot in zip(lookup.keys, answer.slots, strict=False) if slot is not None}
        wanted = self._tracker.open_keys(number)
        places = {
            key: PeerPlace(to_tier_slot(peer, slot), slot.num_bytes, until_s)
            for key, slot in slots.items()
            if key in wanted
        }
        added = self._add_found(number, places, until_s, answer.answered_s)
        self._end_leases(peer, [key for key in slots if key not in added])
        lookup.has_answer = True
        self._end_waiting(number, lookup, peer, answer.answered_s)

    def _end_waiting(self, number: int, lookup: _PeerLookup, peer: int, answered_s: float) -> None:
        """A peer will not answer this lookup any more. After the last peer, keys that no peer holds are MISSING."""
        lookup.waiting.discard(peer)
        if not lookup.waiting:
            del self._lookups[number]
            self._end_lookup(number, LookupAnswer.MISSING if lookup.has_answer else LookupAnswer.TIMED_OUT, answered_s)

    def _on_lost(self, loss: ConnectionLost) -> None:
        for number, lookup in list(self._lookups.items()):
            if loss.peer in lookup.waiting:
                self._end_waiting(number, lookup, loss.peer, loss.answered_s)
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
        ended: dict[int, list[Key]] = {}
        for key, place in places:
            if place.is_leased:
                ended.setdefault(place.peer, []).append(key)
        for peer, keys in ended.items():
            self._end_leases(peer, keys)

    def _end_leases(self, peer: int, keys: Sequence[Key]) -> None:
        if keys:
            self._client.end_leases(peer, keys)

    # Storing.

    def _new_place(self, key: Key, num_bytes: int, extends: Extends) -> Refusal:
        """Nothing is stored at peers. TOO_LARGE, since retrying is pointless."""
        return Refusal.TOO_LARGE
