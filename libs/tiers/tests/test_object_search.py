"""Search for the last manifest, compared with a scan of all; and the paths for manifests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.tiers.object import ObjectOptions, PackPlace, Stored
from hybridkv.tiers.object.format.manifest import ManifestNode, ManifestPart
from hybridkv.tiers.object.manifests.paths import Paths
from hybridkv.tiers.object.manifests.search import (
    MAX_SEARCHING,
    MAX_SEARCHING_FOR_STORES,
    ManifestSearcher,
    find_last,
)
from hybridkv.tiers.object.names import is_manifest_point, manifest_name, prefix_of

EVERY = 4
FULL, WINDOW = b"f" * 16, b"w" * 16


def prefix(number: int) -> bytes:
    return number.to_bytes(32, "little")[::-1]


class Reader:
    def __init__(self, there: set[bytes]) -> None:
        self.there = there
        self.rounds: list[int] = []

    async def read(self, prefixes: Sequence[bytes]) -> list[bytes | None]:
        self.rounds.append(len(prefixes))
        return [each if each in self.there else None for each in prefixes]

    def find(self, prefixes: Sequence[bytes], probes: int = 4, tail: int = 1000) -> bytes | None:
        found = asyncio.run(find_last(prefixes, self.read, EVERY, probes, tail))
        return None if found is None else found[0]


@given(st.lists(st.integers(0, 1 << 16), unique=True, max_size=200), st.data())
def test_the_last_manifest_of_any_engine_is_found(numbers: list[int], data: st.DataObject) -> None:
    """Engines share a beginning; each has a manifest at its end and at every manifest point before it."""
    path = [prefix(number) for number in numbers]
    ends = data.draw(st.lists(st.integers(0, len(path)), max_size=4))
    there = {each for end in ends for each in path[:end] if is_manifest_point(each, EVERY)} | {
        path[end - 1] for end in ends if end
    }
    found = Reader(there).find(path, data.draw(st.integers(1, 20)))
    assert found == (path[max(ends) - 1] if max(ends, default=0) else None)


def test_a_long_path_takes_few_rounds_of_few_reads() -> None:
    path = [prefix(number) for number in range(4096)]
    reader = Reader({each for each in path[:3001] if is_manifest_point(each, EVERY)} | {path[3000]})
    assert reader.find(path, 16, 32) == path[3000]
    assert len(reader.rounds) <= 4
    assert sum(reader.rounds) <= 3 * 16 + 32


def test_an_unknown_prompt_takes_few_rounds() -> None:
    path = [prefix(number) for number in range(1, 4097)]
    reader = Reader(set())
    assert reader.find(path, 16, 32) is None
    assert len(reader.rounds) <= 4, reader.rounds


def stored(tag: bytes, number: int, pack: str, needs: Sequence[bytes]) -> Stored:
    return Stored(tag + prefix(number), PackPlace(pack, 100 * number, 64), needs)


def path_of_two_groups(first: int, stop: int, pack: str) -> list[Stored]:
    chunks = []
    for number in range(first, stop):
        before = [FULL + prefix(number - 1)] if number else []
        chunks.append(stored(FULL, number, pack, before))
        chunks.append(stored(WINDOW, number, pack, [FULL + prefix(number)]))
    return chunks


def test_a_manifest_lists_all_groups_from_the_beginning() -> None:
    paths = Paths(100)
    added = paths.add(path_of_two_groups(0, 5, "p"))
    assert added == [prefix(number) for number in range(5)]
    path = paths.up_to(prefix(4))
    assert path is not None
    assert [node.prefix for node in path] == added
    assert all([part.tag for part in node.parts] == [FULL, WINDOW] for node in path)
    assert path[3].parts[0] == ManifestPart(FULL, "p", 300, 64)


def test_manifests_are_written_at_ends_and_manifest_points() -> None:
    paths = Paths(100)
    added = paths.add(path_of_two_groups(0, 7, "p"))
    ends = paths.manifest_prefixes(added, 1 << 30)
    assert ends[-1] == prefix(6)
    assert set(paths.manifest_prefixes(added, 1)) == set(added)


def test_two_ends_with_one_beginning_get_one_manifest_each() -> None:
    paths = Paths(100)
    chunks = path_of_two_groups(0, 3, "p")
    chunks.append(stored(FULL, 50, "q", [FULL + prefix(2)]))
    chunks.append(stored(FULL, 60, "q", [FULL + prefix(2)]))
    assert [end for end in paths.manifest_prefixes(paths.add(chunks), 1 << 62) if end != prefix(0)] == [
        prefix(50),
        prefix(60),
    ]


def test_a_path_with_an_unknown_beginning_gets_no_manifest() -> None:
    paths = Paths(100)
    paths.add(path_of_two_groups(3, 5, "p"))
    assert paths.up_to(prefix(4)) is None
    paths.add(path_of_two_groups(0, 3, "p"))
    path = paths.up_to(prefix(4))
    assert path is not None
    assert len(path) == 5


def test_parts_of_a_read_manifest_precede_later_stores() -> None:
    paths = Paths(100)
    paths.learn([ManifestNode(prefix(number), [ManifestPart(FULL, "theirs", number, 9)]) for number in range(3)])
    paths.add(path_of_two_groups(3, 4, "mine"))
    path = paths.up_to(prefix(3))
    assert path is not None
    assert [node.parts[0].pack for node in path] == ["theirs"] * 3 + ["mine"]


def test_a_forgotten_prefix_is_no_beginning() -> None:
    paths = Paths(4)
    paths.add(path_of_two_groups(0, 6, "p"))
    assert paths.up_to(prefix(5)) is None


def test_a_group_without_predecessors_gets_its_own_manifest() -> None:
    """In a model without full attention, one state is enough for a resume."""
    paths = Paths(100)
    paths.add([stored(WINDOW, 7, "p", ()), stored(WINDOW, 9, "p", ())])
    for number in (7, 9):
        path = paths.up_to(prefix(number))
        assert path is not None
        assert [node.prefix for node in path] == [prefix(number)]


def test_a_cycle_of_predecessors_is_no_path() -> None:
    paths = Paths(100)
    paths.add([stored(FULL, 1, "p", [FULL + prefix(2)]), stored(FULL, 2, "p", [FULL + prefix(1)])])
    assert paths.up_to(prefix(1)) is None


def test_a_lost_chunk_ends_its_path_until_it_is_stored_again() -> None:
    paths = Paths(100)
    paths.add(path_of_two_groups(0, 5, "p"))
    paths.forget(WINDOW + prefix(2), "p")
    path = paths.up_to(prefix(4))
    assert path is not None and [len(node.parts) for node in path] == [2, 2, 1, 2, 2], "a window is not needed there"
    paths.forget(FULL + prefix(2), "other")
    assert paths.up_to(prefix(4)) is not None
    paths.forget(FULL + prefix(2), "p")
    assert paths.up_to(prefix(4)) is None and paths.up_to(prefix(1)) is not None
    paths.add([stored(FULL, 2, "q", [FULL + prefix(1)])])
    assert paths.up_to(prefix(4)) is not None


def learned(number: int) -> list[ManifestNode]:
    """Path of two groups, as read from a manifest."""
    return [
        ManifestNode(prefix(at), [ManifestPart(FULL, "theirs", at, 9), ManifestPart(WINDOW, "theirs", 100 + at, 9)])
        for at in range(number)
    ]


def test_a_path_read_from_a_manifest_leaves_out_no_part() -> None:
    """The parts that a resume needs are unknown here, and a manifest with a gap would replace one without."""
    paths = Paths(100)
    paths.learn(learned(4))
    paths.forget(WINDOW + prefix(2), "theirs")
    assert paths.up_to(prefix(3)) is None and paths.up_to(prefix(1)) is not None
    paths.add([stored(WINDOW, 2, "mine", [FULL + prefix(2)])])
    path = paths.up_to(prefix(3))
    assert path is not None and [len(node.parts) for node in path] == [2, 2, 2, 2]


def test_a_bad_part_is_not_learned_again() -> None:
    paths = Paths(100)
    paths.learn(learned(4), lambda part: part.offset == 2)
    assert paths.up_to(prefix(3)) is None
    paths.add([stored(FULL, 2, "mine", [FULL + prefix(1)])])
    path = paths.up_to(prefix(3))
    assert path is not None and path[2].parts[-1].pack == "mine"


def test_manifest_points_and_the_last_end_follow_a_bad_part() -> None:
    paths = Paths(1000)
    paths.learn(learned(20))
    expected = [prefix(19), *(prefix(at) for at in range(18, 4, -1) if is_manifest_point(prefix(at), 4))]
    assert paths.manifest_prefixes_between(prefix(5), prefix(19), 4) == expected
    assert paths.manifest_prefixes_between(prefix(5), prefix(99), 4) == [prefix(99)]


def test_a_lost_prefix_is_in_the_manifests_of_all_paths_through_it() -> None:
    paths = Paths(1000)
    paths.add(path_of_two_groups(0, 10, "p"))
    paths.add([stored(FULL, 50, "q", [FULL + prefix(7)]), stored(FULL, 60, "q", [FULL + prefix(2)])])
    every = 1 << 62
    assert set(paths.manifest_prefixes_through({prefix(5)}, every)) - {prefix(0)} == {prefix(9), prefix(50)}
    assert set(paths.manifest_prefixes_through({prefix(5)}, 1)) == {*map(prefix, range(5, 10)), prefix(50)}
    assert paths.manifest_prefixes_through({prefix(99)}, 1) == []


def test_parts_count_towards_the_limit_like_prefixes() -> None:
    paths = Paths(30)
    paths.learn(learned(10))
    assert paths.up_to(prefix(9)) is not None
    paths.learn([ManifestNode(prefix(50), [ManifestPart(FULL, "p", 0, 9)])])
    assert paths.up_to(prefix(9)) is None
    assert len(paths._steps) + paths._num_parts <= 30


class SlowStore:
    """Store that answers a read when the test says so, and a searcher of it."""

    def __init__(self) -> None:
        self.reading: dict[int, asyncio.Future[None]] = {}
        """By number of the lookup, in the order in which they began."""
        self._numbers: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        loop: Any = SimpleNamespace(
            spawn=lambda search: self._tasks.append(asyncio.ensure_future(search)), succeeded=lambda: None
        )
        epochs: Any = SimpleNamespace(manifest_namespace="n")
        reader: Any = SimpleNamespace(read=self._read)
        ignored: Callable[[Any], None] = lambda _: None  # noqa: E731
        self.searcher = ManifestSearcher(ObjectOptions(), reader, epochs, loop, lambda: 0.0, ignored, ignored)

    async def _read(self, name: str) -> None:
        number = self._numbers[name]
        self.reading[number] = asyncio.get_running_loop().create_future()
        await self.reading[number]

    def begin(self, number: int, is_for_store: bool) -> None:
        key = FULL + prefix(number)
        self._numbers[manifest_name("n", prefix_of(key))] = number
        self.searcher.begin(number, [key], 1000.0, is_for_store)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


def test_lookups_of_requests_begin_before_those_of_stores() -> None:
    async def play() -> None:
        store = SlowStore()
        for number in range(MAX_SEARCHING_FOR_STORES + 5):
            store.begin(number, is_for_store=True)
        await store.settle()
        assert len(store.reading) == MAX_SEARCHING_FOR_STORES
        requests = range(100, 100 + MAX_SEARCHING)
        for number in requests:
            store.begin(number, is_for_store=False)
        await store.settle()
        assert list(store.reading)[MAX_SEARCHING_FOR_STORES:] == list(requests)[:-MAX_SEARCHING_FOR_STORES]
        for number in range(MAX_SEARCHING_FOR_STORES):
            store.reading[number].set_result(None)
        await store.settle()
        assert list(store.reading)[MAX_SEARCHING:] == list(requests)[-MAX_SEARCHING_FOR_STORES:], "not the other stores"
        for number in requests:
            store.reading[number].set_result(None)
        await store.settle()
        assert list(store.reading)[-5:] == list(range(MAX_SEARCHING_FOR_STORES, MAX_SEARCHING_FOR_STORES + 5))
        for each in store.reading.values():
            if not each.done():
                each.set_result(None)
        await store.settle()

    asyncio.run(play())
