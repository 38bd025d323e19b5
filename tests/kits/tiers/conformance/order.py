"""What any `EvictionPolicy` does: it gives up what it tracks, each once, and nothing else.

`EvictionPolicyConformance` is a promise of every policy; which of several keys goes first is each policy's own, but for
what tiers promise of any: what is used again and again outlives what is not.
`LeastRecentlyUsedConformance` says what one of them does exactly.
"""

from __future__ import annotations

from hybridkv.tiers.contract import Key
from hybridkv.tiers.ledger import Entry, EvictionPolicy, KeyState

A, B, C, D = b"key a", b"key b", b"key c", b"key d"
ROUNDS = 64


def entry(cost: int = 4096) -> Entry:
    return Entry(cost, KeyState.COMMITTED, 0)


def picked(order: EvictionPolicy[Entry]) -> list[Key]:
    """Everything that it tracks, first to go first."""
    return [order.pick()[0] for _ in range(len(order))]


class EvictionPolicyConformance:
    """Derive from it, and give `make_order`."""

    def make_order(self) -> EvictionPolicy[Entry]:
        """A new order that tracks nothing."""
        raise NotImplementedError

    def make_order_of(self, *keys: Key) -> EvictionPolicy[Entry]:
        order = self.make_order()
        for key in keys:
            order.track(key, entry())
        return order

    def test_a_new_order_tracks_nothing(self) -> None:
        order = self.make_order()
        assert (len(order), list(order)) == (0, [])

    def test_nothing_is_picked_where_nothing_is_tracked(self) -> None:
        order = self.make_order_of(A)
        order.pick()
        try:
            order.pick()
        except LookupError:
            return
        raise AssertionError("something was picked")

    def test_what_is_tracked_is_picked_once_with_its_entry(self) -> None:
        order, entries = self.make_order(), {A: entry(1), B: entry(2), C: entry(3)}
        for key, its_entry in entries.items():
            order.track(key, its_entry)
        assert (len(order), sorted(order)) == (3, [A, B, C])
        found = dict(order.pick() for _ in range(3))
        assert found == entries and all(found[key] is entries[key] for key in entries)
        assert (len(order), list(order)) == (0, [])

    def test_what_is_forgotten_is_never_picked(self) -> None:
        order = self.make_order_of(A, B, C)
        order.forget(B)
        assert (len(order), sorted(order)) == (2, [A, C])
        assert sorted(picked(order)) == [A, C]

    def test_what_was_picked_or_forgotten_may_be_tracked_again(self) -> None:
        order = self.make_order_of(A, B)
        order.forget(A)
        key, _ = order.pick()
        assert key == B
        order.track(A, entry())
        order.track(B, entry())
        assert sorted(picked(order)) == [A, B]

    def test_touching_what_is_not_tracked_does_nothing(self) -> None:
        order = self.make_order_of(A)
        assert order.touch([B, A, C]) == 2
        assert order.touch(iter(())) == 0
        assert picked(order) == [A]
        assert order.touch([A]) == 1
        assert len(order) == 0

    def test_touching_takes_any_iterable_and_any_key_twice(self) -> None:
        order = self.make_order_of(A, B)
        assert order.touch(iter([A, B, A])) == 0
        assert sorted(picked(order)) == [A, B]

    def test_what_is_used_again_and_again_outlives_the_others(self) -> None:
        order = self.make_order_of(A, B, C)
        for number in range(ROUNDS):
            order.touch([A])
            order.track(b"new %d" % number, entry())
            key, _ = order.pick()
            assert key != A
        assert A in list(order)

    def test_everything_goes_at_last(self) -> None:
        """Nothing is protected for good by a use of long ago."""
        order = self.make_order_of(A)
        order.touch([A])
        for number in range(ROUNDS):
            order.track(b"new %d" % number, entry())
            order.touch([b"new %d" % number])
            if order.pick()[0] == A:
                return
        raise AssertionError("it never went")

    def test_an_order_that_gave_up_tracks_nothing_and_begins_anew(self) -> None:
        order = self.make_order_of(A, B)
        order.clear()
        assert (len(order), list(order)) == (0, [])
        order.track(B, entry())
        order.touch([A])
        assert picked(order) == [B]


class LeastRecentlyUsedConformance(EvictionPolicyConformance):
    def test_the_first_tracked_goes_first(self) -> None:
        assert picked(self.make_order_of(A, B, C)) == [A, B, C]

    def test_a_touched_key_goes_behind_the_others_the_last_one_last(self) -> None:
        order = self.make_order_of(A, B, C, D)
        order.touch([B, A])
        assert picked(order) == [C, D, B, A]

    def test_what_is_tracked_again_goes_last(self) -> None:
        order = self.make_order_of(A, B, C)
        order.forget(A)
        order.track(A, entry())
        assert picked(order) == [B, C, A]

    def test_keys_stand_in_the_order_in_which_they_go(self) -> None:
        order = self.make_order_of(A, B, C)
        order.touch([A])
        assert list(order) == [B, C, A]
        assert picked(order) == [B, C, A]
