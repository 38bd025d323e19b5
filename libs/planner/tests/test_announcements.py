"""KV events of the announcer equal those computed from scratch, in an order that a subscriber can apply."""

from __future__ import annotations

from itertools import product, takewhile

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from strategies import caches

from hybridkv.planner import (
    Announcement,
    Announcer,
    CacheSpec,
    ChunkNode,
    GroupKind,
    GroupSpec,
    LookupResult,
    News,
    needed_ends,
)

MISS, PENDING, HIT = LookupResult.MISS, LookupResult.PENDING, LookupResult.HIT
DEPTH, TIERS = 4, 2
NAMES = ["".join(digits) for depth in range(1, DEPTH + 1) for digits in product("0123", "01", "01", "01", repeat=1)]
NAMES = sorted({name[:depth] for name in NAMES for depth in range(1, DEPTH + 1)})
"""Chunks of all paths: a name is its path. Four children at the first level, two below each."""

HYBRID = CacheSpec(
    (
        GroupSpec(GroupKind.RECURRENT, 16),
        GroupSpec(GroupKind.WINDOW, 16, window_tokens=20),
        GroupSpec(GroupKind.FULL, 16),
    ),
    chunk_tokens=16,
)
STATE, WINDOW, FULL = 0, 1, 2

AnnouncedPart = tuple[int, int, str]
"""A tier, a group and a chunk."""


class World:
    """Content of the tiers, and the parts of it that should be announced."""

    def __init__(self, spec: CacheSpec, shared: bool) -> None:
        self.spec = spec
        self.shared = shared
        self.answers: dict[tuple[int, bytes], LookupResult] = {}
        self.known: set[str] = set()

    def chunk(self, name: str) -> ChunkNode[str]:
        keys = tuple(self.key(name, place) for place in range(len(self.spec.stored_groups)))
        parent = name[:-1].encode() or None
        return ChunkNode(name.encode(), parent, len(name) * self.spec.chunk_tokens, keys, name)

    def key(self, name: str, place: int) -> bytes:
        """With a drafter, chunks that differ only after their end share the parts of the other groups."""
        if self.shared and place % 2 == 0:
            name = name[:-1] + str(int(name[-1]) // 2)
        return f"{place}:{name}".encode()

    def answer(self, tier: int, key: bytes) -> LookupResult:
        return self.answers.get((tier, key), MISS)

    def has(self, name: str, place: int, answers: tuple[LookupResult, ...] = (HIT,)) -> bool:
        return any(self.answer(tier, self.key(name, place)) in answers for tier in range(TIERS))

    def forget(self) -> None:
        """Drops chunks that no tier holds or stores."""
        places = range(len(self.spec.stored_groups))
        self.known = {name for name in self.known if any(self.has(name, place, (HIT, PENDING)) for place in places)}

    def needed(self, name: str) -> list[tuple[int, str]]:
        """Parts that a request needs to resume at the end of this chunk."""
        chunk = self.spec.chunk_tokens
        ends = [(index, needed_ends(self.spec, index, len(name) * chunk, 0)) for index in self.spec.stored_groups]
        return [(place, name[: end // chunk]) for place, (_, of_group) in enumerate(ends) for end in of_group]

    def boundaries(self) -> list[str]:
        """Chunks at the end of which a request can resume."""
        return [
            name
            for name in self.known
            if all(part in self.known and self.has(part, place) for place, part in self.needed(name))
        ]

    def should_be_announced(self) -> set[AnnouncedPart]:
        return {
            (tier, self.spec.stored_groups[place], part)
            for name in self.boundaries()
            for place, part in self.needed(name)
            for tier in range(TIERS)
            if self.answer(tier, self.key(part, place)) is HIT
        }


def common_depth(one: str, other: str) -> int:
    """Number of chunks that both paths have in common from their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Subscriber:
    """Applies the events one by one, and fails on one that cannot be applied."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.told: set[AnnouncedPart] = set()

    def apply(self, news: News[str]) -> None:
        for each in news.stored:
            assert self._part(each) not in self.told, "announced twice"
            self.told.add(self._part(each))
            self._require_whole_prefix(each)
        for each in news.removed:
            self.told.remove(self._part(each))
            self._require_whole_prefix(each)

    def _part(self, each: Announcement[str]) -> AnnouncedPart:
        assert each.end_token == len(each.payload) * self.spec.chunk_tokens
        return each.tier, each.group_index, each.payload

    def _require_whole_prefix(self, each: Announcement[str]) -> None:
        if self.spec.groups[each.group_index].kind is not GroupKind.FULL:
            return
        for _, group, name in self.told:
            if group == each.group_index and len(name) > 1:
                assert any((tier, group, name[:-1]) in self.told for tier in range(TIERS)), "a chunk without its prefix"


class AnnouncerMachine(RuleBasedStateMachine):
    """Tiers change in any way, chunks are described in any order, and `take` runs at any time."""

    @initialize(spec=caches(), shared=st.booleans())
    def begin(self, spec: CacheSpec, shared: bool) -> None:
        self.world, self.subscriber = World(spec, shared), Subscriber(spec)
        self.announcer: Announcer[str] = Announcer(spec, TIERS)

    def _places(self) -> range:
        return range(len(self.world.spec.stored_groups))

    def _set(self, tier: int, key: bytes, answer: LookupResult) -> None:
        self.world.answers[tier, key] = answer
        self.announcer.note(tier, key, answer)

    @rule(name=st.sampled_from(NAMES))
    def describe(self, name: str) -> None:
        self._describe(name)

    @rule(name=st.sampled_from([name for name in NAMES if len(name) == DEPTH]))
    def describe_path(self, name: str) -> None:
        for depth in range(1, DEPTH + 1):
            self._describe(name[:depth])

    def _describe(self, name: str) -> None:
        chunk = self.world.chunk(name)
        self.announcer.describe(chunk)
        self.world.known.add(name)
        for key in chunk.keys:
            for tier in range(TIERS):
                self.announcer.note(tier, key, self.world.answer(tier, key))

    @rule(
        data=st.data(),
        tier=st.integers(0, TIERS - 1),
        name=st.sampled_from(NAMES),
        answer=st.sampled_from(LookupResult),
    )
    def change(self, data: st.DataObject, tier: int, name: str, answer: LookupResult) -> None:
        place = data.draw(st.sampled_from(self._places()))
        self._set(tier, self.world.key(name, place), answer)

    @rule(tier=st.integers(0, TIERS - 1), name=st.sampled_from(NAMES))
    def store_path(self, tier: int, name: str) -> None:
        for depth in range(1, len(name) + 1):
            for place in self._places():
                self._set(tier, self.world.key(name[:depth], place), HIT)
            self._describe(name[:depth])

    @rule(tier=st.integers(0, TIERS - 1))
    def clear(self, tier: int) -> None:
        for key in self.announcer.known_keys():
            self._set(tier, key, MISS)
        self.world.answers = {each: answer for each, answer in self.world.answers.items() if each[0] != tier}

    @rule()
    def take(self) -> None:
        self.subscriber.apply(self.announcer.take())
        self.world.forget()
        assert self.subscriber.told == self.world.should_be_announced()
        told = [(each.tier, each.group_index, each.payload) for each in self.announcer.announced()]
        assert (
            set(told) == self.subscriber.told and len(told) == len(self.subscriber.told) == self.announcer.num_announced
        )
        assert self.announcer.num_chunks == len(self.world.known)
        assert all(self.announcer.knows(name.encode()) == (name in self.world.known) for name in NAMES)
        places = [(name, place) for name in self.world.known for place in self._places()]
        held = [
            (tier, *each)
            for each in places
            for tier in range(TIERS)
            if self.world.answer(tier, self.world.key(*each)) is HIT
        ]
        assert self.announcer.num_held == len(held)
        full = {
            group for group in self.world.spec.stored_groups if self.world.spec.groups[group].kind is GroupKind.FULL
        }
        assert self.announcer.num_on_paths == len({name for _, group, name in self.subscriber.told if group in full})
        self._compare_routers()

    def _compare_routers(self) -> None:
        """Two routers that use the events of one kind of group alone, beside the resume points found by brute force."""
        boundaries = self.world.boundaries()
        for prompt in NAMES:
            exact = max((len(name) for name in boundaries if prompt.startswith(name)), default=0)
            for group in self.world.spec.stored_groups:
                told = {name for _, told_group, name in self.subscriber.told if told_group == group}
                match self.world.spec.groups[group].kind:
                    case GroupKind.RECURRENT:
                        assert exact == max((len(name) for name in told if prompt.startswith(name)), default=0)
                    case GroupKind.FULL:
                        by_attention = next(
                            (depth for depth in range(len(prompt)) if prompt[: depth + 1] not in told), len(prompt)
                        )
                        assert by_attention == max((common_depth(prompt, name) for name in boundaries), default=0)
                        assert by_attention >= exact


def test_announcements_equal_those_computed_from_scratch() -> None:
    run_state_machine_as_test(AnnouncerMachine, settings=settings(max_examples=examples(400), stateful_step_count=30))


class Store:
    """A few paths of one hybrid cache in one tier."""

    def __init__(self) -> None:
        self.world = World(HYBRID, shared=False)
        self.announcer: Announcer[str] = Announcer(HYBRID, 1)

    def store(self, name: str, *places: int) -> Store:
        self.announcer.describe(self.world.chunk(name))
        for place in places:
            self.announcer.note(0, self.world.key(name, place), HIT)
        return self

    def lose(self, name: str, place: int) -> Store:
        self.announcer.note(0, self.world.key(name, place), MISS)
        return self

    def news(self) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
        news = self.announcer.take()
        return (
            {(each.group_index, each.payload) for each in news.stored},
            {(each.group_index, each.payload) for each in news.removed},
        )


def test_attention_chunks_without_a_state_after_them_are_not_announced() -> None:
    told = Store().store("0", WINDOW, FULL).store("00", WINDOW, FULL, STATE).store("000", WINDOW, FULL)
    stored, removed = told.news()
    assert stored == {(FULL, "0"), (FULL, "00"), (STATE, "00"), (WINDOW, "0"), (WINDOW, "00")}
    assert not removed
    # The other two are the window and the full chunk after the state.
    assert (told.announcer.num_held, told.announcer.num_announced) == (7, 5)


def test_attention_events_alone_cannot_be_exact_for_two_prompts_that_diverge() -> None:
    """A prompt that resumes after its fourth chunk needs its first two announced. A prompt that diverges from it there
    resumes nowhere, yet a router that counts attention blocks sees two. The state events distinguish the two."""
    told = Store().store("0", WINDOW, FULL).store("00", WINDOW, FULL).store("000", WINDOW, FULL)
    stored, _ = told.store("0000", WINDOW, FULL, STATE).news()
    attention, states = ({name for group, name in stored if group == kind} for kind in (FULL, STATE))
    continues, parts = "0000", "0010"
    assert [sum(prompt[:depth] in attention for depth in range(1, 5)) for prompt in (continues, parts)] == [4, 2]
    assert [sum(prompt[:depth] in states for depth in range(1, 5)) for prompt in (continues, parts)] == [1, 0]


def test_losing_a_state_withdraws_the_chunks_that_only_it_needed() -> None:
    told = Store().store("0", WINDOW, FULL, STATE).store("00", WINDOW, FULL, STATE)
    told.news()
    stored, removed = told.lose("00", STATE).news()
    assert not stored
    assert removed == {(FULL, "00"), (STATE, "00"), (WINDOW, "00")}


def test_losing_a_prefix_chunk_withdraws_all_after_it_until_it_returns() -> None:
    told = Store().store("0", WINDOW, FULL, STATE).store("00", WINDOW, FULL, STATE)
    before, _ = told.news()
    _, removed = told.lose("0", FULL).news()
    assert removed == before
    stored, _ = told.store("0", FULL).news()
    assert stored == before


def test_a_change_that_is_reverted_between_two_takes_is_no_event() -> None:
    told = Store().store("0", WINDOW, FULL, STATE)
    told.news()
    told.lose("0", FULL).store("0", FULL).store("1", WINDOW, FULL, STATE)
    for place in (WINDOW, FULL, STATE):
        told.lose("1", place)
    assert told.news() == (set(), set())
    assert told.announcer.num_chunks == 1


def test_a_pending_chunk_is_known_and_not_announced() -> None:
    told = Store()
    told.announcer.describe(told.world.chunk("0"))
    told.announcer.note(0, told.world.key("0", FULL), PENDING)
    assert told.news() == (set(), set())
    assert told.announcer.knows(b"0")
    told.lose("0", FULL).news()
    assert not told.announcer.knows(b"0")


def test_a_chunk_with_too_few_keys_is_refused() -> None:
    announcer: Announcer[None] = Announcer(HYBRID, 1)
    with pytest.raises(ValueError, match="a key for each of the groups"):
        announcer.describe(ChunkNode(b"0", None, 16, (b"key",), None))


@given(st.integers(2, 400))
def test_the_cost_of_one_more_chunk_does_not_grow_with_the_path(depth: int) -> None:
    """Measured as the number of chunks that are checked for changes."""
    told = Store()
    for length in range(1, depth + 1):
        told.store("0" * length, WINDOW, FULL, STATE)
        told.announcer.take()
    told.store("0" * (depth + 1), WINDOW, FULL)
    told.announcer.take()
    told.store("0" * (depth + 1), STATE)
    assert len(told.announcer._changed) <= 3
