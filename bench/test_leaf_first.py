"""The prototype of a ledger that evicts leaves first: what it holds, compared with sets that are searched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from leaf_first import Leaves

CHUNKS = 5


def named(path: list[int]) -> list[int]:
    """Numbers of a path's chunks, of which each stands for the path up to its end."""
    numbers = []
    number = 0
    for branch in path:
        number = 10 * number + branch + 1
        numbers.append(number)
    return numbers


paths = st.lists(st.integers(0, 2), min_size=1, max_size=CHUNKS).map(named)
requests = st.lists(st.tuples(paths, st.sets(st.integers(0, CHUNKS - 1))), max_size=30)


@given(requests, st.integers(1, 20))
def test_nothing_is_held_without_what_it_extends_and_what_is_held_fits(
    asked: list[tuple[list[int], set[int]]], capacity: int
) -> None:
    store = Leaves(capacity)
    for path, stops in asked:
        wanted = []
        for place, key in enumerate(path):
            wanted.append((key, 1))
            if place in stops:
                wanted.append((-key, 2))
        store.use(wanted)
        entries = store._entries
        assert sum(num_bytes for num_bytes, _, _ in entries.values()) + store._free == capacity
        for key, (_, extends, num_extending) in entries.items():
            assert extends == (abs(key) // 10 if key > 0 else -key)
            assert not extends or extends in entries
            assert num_extending == sum(entry[1] == key for entry in entries.values())
            assert (key in store._leaves) == (num_extending == 0)
        assert store.has(path[0]), "a path does not push out its own beginning"


def test_a_path_that_is_used_outlives_one_that_is_not_and_each_goes_from_its_end() -> None:
    store = Leaves(6)
    first, second = ([(key, 1) for key in named([branch] * 3)] for branch in (0, 1))
    store.use(first)
    store.use(second)
    store.use(first)
    store.use([(key, 1) for key in named([2, 2])])
    assert [store.has(key) for key, _ in first] == [True] * 3
    assert [store.has(key) for key, _ in second] == [True, False, False]
