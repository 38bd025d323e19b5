"""Contract of any `EvictionPolicy`: it returns the keys that it tracks, each once, and no other.

`EvictionPolicyConformance` is for every policy; which of several keys goes first is each policy's own decision, except
that a key in constant use outlives unused ones. `LeastRecentlyUsedConformance` is the exact order of LRU.
"""

from __future__ import annotations

from hybridkv.tiers.contract import Key
from hybridkv.tiers.ledger import Entry, EvictionPolicy, KeyState

A, B, C, D = b"key a", b"key b", b"key c", b"key d"
ROUNDS = 64


def entry(cost: int = 4096) -> Entry:
    return Entry(cost, KeyState.COMMITTED, 0)


def picked(order: EvictionPolicy[Entry]) -> list[Key]:
    """All tracked keys, first to go first."""
    return [order.pick()[0] for _ in range(len(order))]


class EvictionPolicyConformance:
    """Derive from it and define `make_order`."""

    def make_order(self) -> EvictionPolicy[Entry]:
        """A new policy that tracks nothing."""
        raise NotImplementedError

    def make_order_of(self, *keys: Key) -> EvictionPolicy[Entry]:
        order = self.make_order()
        for key in keys:
            order.track(key, entry())
        return order

    def test_a_new_order_tracks_nothing(self) -> None:
        order = self.make_order()
        assert (len(order), list(order)) == (0, [])

    def test_picking_from_an_empty_policy_is_an_error(self) -> None:
        order = self.make_order_of(A)
        order.pick()
        try:
            order.pick()
        except LookupError:
            return
        raise AssertionError("a key was picked")

    def test_a_tracked_key_is_picked_once_with_its_entry(self) -> None:
        order, entries = self.make_order(), {A: entry(1), B: entry(2), C: entry(3)}
        for key, its_entry in entries.items():
            order.track(key, its_entry)
        assert (len(order), sorted(order)) == (3, [A, B, C])
        found = dict(order.pick() for _ in range(3))
        assert found == entries and all(found[key] is entries[key] for key in entries)
        assert (len(order), list(order)) == (0, [])

    def test_a_forgotten_key_is_never_picked(self) -> None:
        order = self.make_order_of(A, B, C)
        order.forget(B)
        assert (len(order), sorted(order)) == (2, [A, C])
        assert sorted(picked(order)) == [A, C]

    def test_a_picked_or_forgotten_key_may_be_tracked_again(self) -> None:
        order = self.make_order_of(A, B)
        order.forget(A)
        key, _ = order.pick()
        assert key == B
        order.track(A, entry())
        order.track(B, entry())
        assert sorted(picked(order)) == [A, B]

    def test_touching_an_untracked_key_does_nothing(self) -> None:
        order = self.make_order_of(A)
        assert order.touch([B, A, C]) == 2
        assert order.touch(iter(())) == 0
        assert picked(order) == [A]
        assert order.touch([A]) == 1
        assert len(order) == 0

    def test_touch_takes_any_iterable_and_repeated_keys(self) -> None:
        order = self.make_order_of(A, B)
        assert order.touch(iter([A, B, A])) == 0
        assert sorted(picked(order)) == [A, B]

    def test_a_key_in_constant_use_outlives_the_others(self) -> None:
        order = self.make_order_of(A, B, C)
        for number in range(ROUNDS):
            order.touch([A])
            order.track(b"new %d" % number, entry())
            key, _ = order.pick()
            assert key != A
        assert A in list(order)

    def test_every_key_is_evicted_in_the_end(self) -> None:
        """An old use does not protect a key for ever."""
        order = self.make_order_of(A)
        order.touch([A])
        for number in range(ROUNDS):
            order.track(b"new %d" % number, entry())
            order.touch([b"new %d" % number])
            if order.pick()[0] == A:
                return
        raise AssertionError("the key was never evicted")

    def test_a_cleared_policy_tracks_nothing_and_can_be_used_again(self) -> None:
        order = self.make_order_of(A, B)
        order.clear()
        assert (len(order), list(order)) == (0, [])
        order.track(B, entry())
        order.touch([A])
        assert picked(order) == [B]


class LeastRecentlyUsedConformance(EvictionPolicyConformance):
    def test_the_first_tracked_goes_first(self) -> None:
        assert picked(self.make_order_of(A, B, C)) == [A, B, C]

    def test_touched_keys_go_after_the_others_the_last_one_last(self) -> None:
        order = self.make_order_of(A, B, C, D)
        order.touch([B, A])
        assert picked(order) == [C, D, B, A]

    def test_a_key_that_is_tracked_again_goes_last(self) -> None:
        order = self.make_order_of(A, B, C)
        order.forget(A)
        order.track(A, entry())
        assert picked(order) == [B, C, A]

    def test_iteration_is_in_the_order_of_eviction(self) -> None:
        order = self.make_order_of(A, B, C)
        order.touch([A])
        assert list(order) == [B, C, A]
        assert picked(order) == [B, C, A]
