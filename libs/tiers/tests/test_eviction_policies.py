"""Conformance of each eviction policy; LRU equals its model for any sequence of calls."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hybridkv.tiers.ledger import Entry, EvictionPolicy, KeyState, LruPolicy  # noqa: E402
from kits.tiers.conformance import EvictionPolicyConformance, LeastRecentlyUsedConformance  # noqa: E402

keys = st.sampled_from([bytes([number]) for number in range(6)])


class TestLeastRecentlyUsed(LeastRecentlyUsedConformance):
    def make_order(self) -> EvictionPolicy[Entry]:
        return LruPolicy()


class FirstInFirstOut(LruPolicy[Entry]):
    """Policy that ignores uses. The suite must reject it."""

    def touch(self, keys: object) -> int:
        return 0


class Hoarder(LruPolicy[Entry]):
    """Policy that evicts the most recently used entry, and keeps old ones for ever."""

    def pick(self) -> tuple[bytes, Entry]:
        return self._entries.popitem()


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (FirstInFirstOut, "test_a_key_in_constant_use_outlives_the_others"),
        (FirstInFirstOut, "test_touching_an_untracked_key_does_nothing"),
        (Hoarder, "test_every_key_is_evicted_in_the_end"),
    ],
)
def test_the_suite_rejects_a_wrong_policy(policy: type[LruPolicy[Entry]], test: str) -> None:
    class Suite(EvictionPolicyConformance):
        def make_order(self) -> EvictionPolicy[Entry]:
            return policy()

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


CALLS = ["track", "track", "touch", "pick", "forget", "give up"]


@given(st.lists(st.tuples(st.sampled_from(CALLS), keys, keys)))
def test_lru_equals_a_list_with_a_linear_search(calls: list[tuple[str, bytes, bytes]]) -> None:
    order: LruPolicy[Entry] = LruPolicy()
    expected: list[bytes] = []
    for call, key, other in calls:
        if call == "track" and key not in expected:
            order.track(key, Entry(1, KeyState.COMMITTED, 0))
            expected.append(key)
        elif call == "touch":
            assert order.touch([key, other]) == sum(each not in expected for each in (key, other))
            for each in (key, other):
                if each in expected:
                    expected.remove(each)
                    expected.append(each)
        elif call == "pick" and expected:
            assert order.pick()[0] == expected.pop(0)
        elif call == "forget" and key in expected:
            order.forget(key)
            expected.remove(key)
        elif call == "give up":
            order.clear()
            expected.clear()
        assert list(order) == expected and len(order) == len(expected)
