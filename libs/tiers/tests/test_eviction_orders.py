"""Every policy of eviction passes one suite; least recently used is what it is called, for any sequence of calls."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hybridkv.tiers.ledger import Entry, EvictionOrder, KeyState, LeastRecentlyUsed  # noqa: E402
from kits.tiers.conformance import EvictionOrderConformance, LeastRecentlyUsedConformance  # noqa: E402

keys = st.sampled_from([bytes([number]) for number in range(6)])


class TestLeastRecentlyUsed(LeastRecentlyUsedConformance):
    def make_order(self) -> EvictionOrder[Entry]:
        return LeastRecentlyUsed()


class FirstInFirstOut(LeastRecentlyUsed[Entry]):
    """Takes no note of uses: what the suite must find out."""

    def touch(self, keys: object) -> int:
        return 0


class Deaf(LeastRecentlyUsed[Entry]):
    """Takes no note of what goes first."""

    def demote(self, keys: object) -> int:
        return 0


class Unforgiving(LeastRecentlyUsed[Entry]):
    """Never takes back that something goes first."""

    def touch(self, keys: Iterable[bytes]) -> int:
        return super().touch(key for key in keys if key not in self._demoted)


class Hoarder(LeastRecentlyUsed[Entry]):
    """Gives up what was used last, and so keeps what was used once for ever."""

    def pick(self) -> tuple[bytes, Entry]:
        return self._entries.popitem()


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (FirstInFirstOut, "test_what_is_used_again_and_again_outlives_the_others"),
        (FirstInFirstOut, "test_touching_what_is_not_tracked_does_nothing"),
        (Hoarder, "test_everything_goes_at_last"),
        (Deaf, "test_what_is_demoted_goes_before_all_others_in_the_order_that_was_told"),
        (Deaf, "test_demoting_what_is_not_tracked_does_nothing"),
        (Unforgiving, "test_a_touch_takes_a_demotion_back"),
    ],
)
def test_the_suite_finds_a_policy_that_is_none(policy: type[LeastRecentlyUsed[Entry]], test: str) -> None:
    class Suite(EvictionOrderConformance):
        def make_order(self) -> EvictionOrder[Entry]:
            return policy()

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


CALLS = ["track", "track", "touch", "demote", "pick", "forget", "give up"]


@given(st.lists(st.tuples(st.sampled_from(CALLS), keys, keys)))
def test_least_recently_used_is_a_list_that_is_searched(calls: list[tuple[str, bytes, bytes]]) -> None:
    order: LeastRecentlyUsed[Entry] = LeastRecentlyUsed()
    expected: list[bytes] = []
    demoted: list[bytes] = []
    for call, key, other in calls:
        if call == "track" and key not in expected + demoted:
            order.track(key, Entry(1, KeyState.COMMITTED, 0))
            expected.append(key)
        elif call == "touch":
            assert order.touch([key, other]) == sum(each not in expected + demoted for each in (key, other))
            for each in (key, other):
                move(each, expected, demoted, expected)
        elif call == "demote":
            assert order.demote([key, other]) == sum(each not in expected + demoted for each in (key, other))
            for each in (key, other):
                move(each, expected, demoted, demoted)
        elif call == "pick" and expected + demoted:
            assert order.pick()[0] == (demoted or expected).pop(0)
        elif call == "forget" and key in expected + demoted:
            order.forget(key)
            (expected if key in expected else demoted).remove(key)
        elif call == "give up":
            order.give_up()
            expected.clear()
            demoted.clear()
        assert list(order) == demoted + expected and len(order) == len(demoted + expected)


def move(key: bytes, expected: list[bytes], demoted: list[bytes], to: list[bytes]) -> None:
    """To the end of one of them, if it is in either."""
    for each in (expected, demoted):
        if key in each:
            each.remove(key)
            to.append(key)
            return
