"""`TierLookup` equals lookups in the index key by key, for any batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from unittest import mock

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.lookups import PendingIsMiss, RequestKeys, TierLookup
from hybridkv.hashing import ChunkKeys, GroupFingerprint, LayerFingerprint
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, Hit, LookupResult, Miss, Pending, longest_hit
from hybridkv.tiers import Slot
from hybridkv.tiers.ram import RamIndex

BLOCK = 4
CHUNKS = 53
FULL = GroupSpec(GroupKind.FULL, BLOCK)
DRAFTER = GroupSpec(GroupKind.FULL, BLOCK, lookahead_tokens=BLOCK)
STATE = GroupSpec(GroupKind.RECURRENT, 2 * BLOCK)
STATE_OF_OTHERS = GroupSpec(GroupKind.RECURRENT, BLOCK)
SCRATCH = GroupSpec(GroupKind.SCRATCH, BLOCK)
KINDS = (
    FULL,
    DRAFTER,
    STATE,
    SCRATCH,
    GroupSpec(GroupKind.WINDOW, BLOCK, window_tokens=3),
    GroupSpec(GroupKind.WINDOW, BLOCK, window_tokens=30),
    GroupSpec(GroupKind.CHUNKED, BLOCK, align_tokens=24),
)


def chain(num_hashes: int, prompt: bytes = b"") -> list[bytes]:
    hashes = [hashlib.sha256(prompt).digest()]
    while len(hashes) < num_hashes:
        hashes.append(hashlib.sha256(hashes[-1]).digest())
    return hashes


HASHES = chain(CHUNKS * 2 + 1)


@dataclass(frozen=True, slots=True)
class Keyed:
    """Layout, with the keys of an engine that has it."""

    layout: CacheLayout
    keys: ChunkKeys

    @property
    def spec(self) -> CacheSpec:
        return self.layout.spec

    def key(self, group_index: int, hashes: Sequence[bytes], end_token: int) -> bytes:
        return self.keys.key(self.spec.stored_groups.index(group_index), hashes, end_token)


def make_layout(groups: Sequence[GroupSpec], tail_tokens: int | None = None) -> Keyed:
    spec = CacheSpec(tuple(groups), 2 * BLOCK, tail_tokens)
    prints = tuple(
        GroupFingerprint(
            kind=spec.groups[i].kind,
            block_tokens=spec.groups[i].block_tokens,
            layers=(LayerFingerprint(name=f"layer{i}", page_bytes=1),),
            lookahead_tokens=spec.groups[i].lookahead_tokens,
        )
        for i in spec.stored_groups
    )
    layout = CacheLayout(spec, ((),) * len(spec.groups), prints, BLOCK, "sha256", 1)
    return Keyed(layout, ChunkKeys(layout.fingerprint({"model": "m"}), BLOCK))


def hold(index: RamIndex, key: bytes, answer: LookupResult) -> None:
    """Bring a key to the state in which a lookup returns `answer`."""
    if index.lookup(key) is LookupResult.PENDING and answer is not LookupResult.PENDING:
        index.commit(key)
    if index.lookup(key) is LookupResult.HIT and answer is not LookupResult.HIT:
        index.invalidate(key)
    if index.lookup(key) is LookupResult.MISS and answer is not LookupResult.MISS:
        assert isinstance(index.reserve(key, 1), Slot)
        if answer is LookupResult.HIT:
            index.commit(key)


Store = dict[tuple[int, int], LookupResult]


@st.composite
def stores(draw: st.DrawFn, spec: CacheSpec) -> Store:
    """Prefixes of any length, with gaps and pending parts."""
    step = spec.boundary_tokens
    store = {}
    for group in spec.stored_groups:
        length = draw(st.one_of(st.integers(0, CHUNKS), st.just(CHUNKS)))
        store |= {(group, end): LookupResult.HIT for end in range(step, length * spec.chunk_tokens + 1, step)}
        for _ in range(draw(st.integers(0, 3))):
            end = draw(st.integers(1, CHUNKS * spec.chunk_tokens // step)) * step
            store[group, end] = draw(st.sampled_from(LookupResult))
    return store


def fill(index: RamIndex, layout: Keyed, store: Store, hashes: Sequence[bytes]) -> None:
    step = layout.spec.boundary_tokens
    for group in layout.spec.stored_groups:
        for end in range(step, CHUNKS * layout.spec.chunk_tokens + 1, step):
            hold(index, layout.key(group, hashes, end), store.get((group, end), LookupResult.MISS))


def plain(
    layout: Keyed, index: RamIndex, hashes: Sequence[bytes], tokens: tuple[int, int], pending_is_miss: bool
) -> Hit | Pending | Miss:
    def lookup(group: int, end: int) -> LookupResult:
        answer = index.lookup(layout.key(group, hashes, end))
        return LookupResult.MISS if pending_is_miss and answer is LookupResult.PENDING else answer

    return longest_hit(layout.spec, *tokens, lookup)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_a_search_equals_the_search_key_by_key(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4).filter(lambda g: set(g) != {SCRATCH}))
    layout = make_layout(groups, data.draw(st.sampled_from([None, None, BLOCK])))
    index = RamIndex(1 << 16, 1)
    parted = HASHES[:20] + chain(len(HASHES) - 20, b"another")
    requests = [(hashes, RequestKeys(layout.spec, layout.keys)) for hashes in (HASHES, parted)]
    second_batch = data.draw(st.sampled_from([1, 8, 256]))
    for _ in range(3):
        fill(index, layout, data.draw(stores(layout.spec)), HASHES)
        for hashes, keys in requests:
            num_tokens = data.draw(st.integers(0, CHUNKS * layout.spec.chunk_tokens))
            tokens = (num_tokens, data.draw(st.sampled_from([0, 0, num_tokens // 2, max(0, num_tokens - 9)])))
            pending_is_miss = data.draw(st.booleans())
            known = hashes[: num_tokens // BLOCK]
            ranges = TierLookup(keys.follow(known), index, pending_is_miss)
            with mock.patch("hybridkv.connectors.vllm.common.lookups._SECOND_BATCH", second_batch):
                found = longest_hit(layout.spec, *tokens, ranges, ranges)
            expected = plain(layout, index, known, tokens, pending_is_miss)
            assert type(found) is type(expected)
            assert getattr(found, "num_tokens", None) == getattr(expected, "num_tokens", None)


def make_keys(*groups: GroupSpec) -> tuple[Keyed, RequestKeys]:
    layout = make_layout(groups or (FULL, DRAFTER))
    return layout, RequestKeys(layout.spec, layout.keys).follow(HASHES)


def expected_keys(layout: Keyed, group: int, first: int, stop: int) -> list[bytes]:
    chunk = layout.spec.chunk_tokens
    return [layout.key(group, HASHES, (n + 1) * chunk) for n in range(first, stop)]


spans = st.tuples(st.integers(0, CHUNKS - 1), st.integers(1, CHUNKS)).map(lambda s: (s[0], min(CHUNKS, s[0] + s[1])))


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1), spans), max_size=12))
def test_keys_do_not_depend_on_order_and_batches(
    asked: list[tuple[bool, int, tuple[int, int]]],
) -> None:
    layout, keys = make_keys()
    for is_single, group, (first, stop) in asked:
        if is_single:
            key = keys.key(group, (first + 1) * layout.spec.chunk_tokens)
            assert [key] == expected_keys(layout, group, first, first + 1)
        else:
            assert list(keys.between(group, first, stop)) == expected_keys(layout, group, first, stop)
        assert 0 <= keys.cached_range(group)[0] <= keys.cached_range(group)[1] <= CHUNKS


def test_a_scratch_group_has_no_number_in_keys() -> None:
    layout, keys = make_keys(SCRATCH, FULL)
    assert keys.key(1, 8) == layout.keys.key(0, HASHES, 8) == layout.key(1, HASHES, 8)


class CountingKeys(ChunkKeys):
    """Counts derived keys."""

    num_derived = 0

    def key(self, group: int, prefix_hashes: Sequence[bytes], end_token: int) -> bytes:
        self.num_derived += 1
        return super().key(group, prefix_hashes, end_token)

    def keys(self, group: int, prefix_hashes: Sequence[bytes], end_tokens: Sequence[int]) -> list[bytes]:
        self.num_derived += len(end_tokens)
        return super().keys(group, prefix_hashes, end_tokens)


def make_lookup(*groups: GroupSpec, stored_chunks: int = 0) -> tuple[Keyed, CountingKeys, RamIndex]:
    layout = make_layout(groups)
    index = RamIndex(1 << 16, 1)
    for group in layout.spec.stored_groups:
        for key in expected_keys(layout, group, 0, stored_chunks):
            hold(index, key, LookupResult.HIT)
    counting = CountingKeys(layout.keys.fingerprint, BLOCK)
    return Keyed(layout.layout, counting), counting, index


def search(layout: Keyed, keys: RequestKeys, index: RamIndex, hashes: Sequence[bytes] = HASHES) -> Hit | Pending | Miss:
    ranges = TierLookup(keys.follow(hashes), index)
    return longest_hit(layout.spec, len(hashes) * BLOCK, 0, ranges, ranges)


def test_a_prompt_without_stored_chunks_costs_one_key() -> None:
    layout, counting, index = make_lookup(STATE, FULL)
    assert isinstance(search(layout, RequestKeys(layout.spec, layout.keys), index), Miss)
    assert counting.num_derived == 1


def test_a_waiting_request_derives_no_key_again() -> None:
    layout, counting, index = make_lookup(STATE, FULL, stored_chunks=CHUNKS)
    keys = RequestKeys(layout.spec, layout.keys)
    assert search(layout, keys, index) == Hit(CHUNKS * layout.spec.chunk_tokens)
    derived = counting.num_derived
    assert derived <= CHUNKS + 2
    index.invalidate(keys.key(1, 80))
    index.reserve(b"another request's", 1)
    assert isinstance(search(layout, keys, index), Hit | Miss)
    index.clear()
    assert isinstance(search(layout, keys, index), Miss)
    assert counting.num_derived <= derived + CHUNKS, "states that are missing now, and no key of the full prefix"


def test_a_request_grown_by_a_chunk_derives_only_its_new_keys() -> None:
    layout, counting, index = make_lookup(STATE, FULL, stored_chunks=CHUNKS)
    keys = RequestKeys(layout.spec, layout.keys)
    search(layout, keys, index, HASHES[:-2])
    before = counting.num_derived
    assert search(layout, keys, index, HASHES) == Hit(CHUNKS * layout.spec.chunk_tokens)
    assert counting.num_derived - before == 2


def test_missing_states_cost_the_keys_of_one_group() -> None:
    layout, counting, index = make_lookup(STATE, STATE_OF_OTHERS, FULL)
    for key in expected_keys(layout, 2, 0, CHUNKS):
        hold(index, key, LookupResult.HIT)
    counting.num_derived = 0
    assert isinstance(search(layout, RequestKeys(layout.spec, layout.keys), index), Miss)
    assert counting.num_derived <= CHUNKS + 3, "and a few of the full prefix"


def test_changed_hashes_drop_the_cached_keys() -> None:
    layout, keys = make_keys()
    keys.between(0, 0, 10)
    changed = [*HASHES[:3], *chain(30, b"changed")]
    keys.follow(changed)
    assert keys.key(0, 80) == layout.key(0, changed, 80) != layout.key(0, HASHES, 80)
    keys.between(0, 0, 10)
    keys.follow(changed[:6])
    assert keys.cached_range(0)[0] == keys.cached_range(0)[1]


changes = st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24), st.booleans(), spans), max_size=8)


@settings(deadline=None)
@given(changes)
def test_keys_follow_the_hashes_after_a_rollback_and_regrowth(
    asked: list[tuple[int, int, bool, tuple[int, int]]],
) -> None:
    """The same list is cut and grows again, as the engine's own does, observed in between or not."""
    layout, keys = make_keys(FULL)
    chunk = layout.spec.chunk_tokens
    hashes: list[bytes] = []
    for number, (kept, new, is_seen, (first, stop)) in enumerate(asked):
        del hashes[kept:]
        hashes += chain(new, b"%d" % number) if new else []
        known = len(hashes) * BLOCK // chunk
        if is_seen and first < min(stop, known):
            expected = [layout.key(0, hashes, (n + 1) * chunk) for n in range(first, min(stop, known))]
            assert list(keys.follow(hashes).between(0, first, min(stop, known))) == expected


@pytest.mark.parametrize("pending_is_miss", [False, True])
def test_a_pending_key_is_held_unless_it_counts_as_a_miss(pending_is_miss: bool) -> None:
    layout, _, index = make_lookup(FULL, stored_chunks=10)
    for chunk in (4, 9):
        hold(index, layout.key(0, HASHES, (chunk + 1) * 8), LookupResult.PENDING)
    lookup = TierLookup(RequestKeys(layout.spec, layout.keys).follow(HASHES), index, pending_is_miss)
    assert lookup.num_leading_held(0, 8, 160) == (4 if pending_is_miss else 10)
    assert lookup.last_held(0, 8, 160) == (72 if pending_is_miss else 80)
    assert lookup.any_pending(0, 8, 80) is not pending_is_miss
    assert lookup(0, 40) is (LookupResult.MISS if pending_is_miss else LookupResult.PENDING)


def test_cached_keys_are_unique_and_without_gaps() -> None:
    _, keys = make_keys()
    for first, stop in pairwise((20, 30, 40, 50)):
        keys.between(0, first, stop)
    keys.between(0, 3, 4)
    assert keys.cached_range(0) == (20, 50)
    keys.between(0, 0, 2)
    assert keys.cached_range(0) == (0, 2)


class FixedAnswers:
    """Tiers with fixed answers: held, being stored, lookup pending, or missing."""

    def __init__(self, answers: str) -> None:
        self.answers = {b"%d" % place: answer for place, answer in enumerate(answers)}

    def lookup(self, key: bytes) -> LookupResult:
        return {"h": LookupResult.HIT, "-": LookupResult.MISS}.get(self.answers[key], LookupResult.PENDING)

    def leading(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if self.lookup(key) is LookupResult.MISS), len(keys))

    def last_held(self, keys: Sequence[bytes]) -> int | None:
        return max((i for i, key in enumerate(keys) if self.lookup(key) is not LookupResult.MISS), default=None)

    def any_pending(self, keys: Sequence[bytes]) -> bool:
        return any(self.lookup(key) is LookupResult.PENDING for key in keys)

    def is_lookup_pending(self, key: bytes) -> bool:
        return self.answers[key] == "a"


@given(st.text("hsa-", max_size=8))
def test_pending_is_miss_changes_only_the_chosen_pending_lookups(answers: str) -> None:
    index = FixedAnswers(answers)
    without_async, without_pending = answers.replace("a", "-"), answers.replace("a", "-").replace("s", "-")
    for view, expected in (
        (PendingIsMiss(index, index.is_lookup_pending), FixedAnswers(without_async)),
        (PendingIsMiss(index), FixedAnswers(without_pending)),
    ):
        keys = list(index.answers)
        assert [view.lookup(key) for key in keys] == [expected.lookup(key) for key in keys]
        assert (view.leading(keys), view.last_held(keys)) == (expected.leading(keys), expected.last_held(keys))
        assert view.any_pending(keys) == expected.any_pending(keys)
