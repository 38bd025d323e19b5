import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import caches

from hybridkv.planner import CacheSpec, HybridOffloadPlanner, Problem, diagnose

PLANNER = HybridOffloadPlanner(16, (65536, 65536, 65536, 1056), 16384)
WHOLE = HybridOffloadPlanner(hash_block_size=16, gpu_block_sizes=(65536, 50000, 1056), fixed_chunk_size=16384)


@st.composite
def planners(draw: st.DrawFn) -> HybridOffloadPlanner:
    hash_block = draw(st.integers(1, 12))
    blocks = draw(st.lists(st.integers(1, 200), min_size=1, max_size=6))
    whole = draw(st.none() | st.sets(st.sampled_from(range(len(blocks))), max_size=2).map(tuple))
    return HybridOffloadPlanner(hash_block, tuple(blocks), draw(st.integers(hash_block, 120)), whole)


def test_large_blocks_are_split_and_small_ones_kept() -> None:
    assert PLANNER.offload_unit_sizes == (16384, 16384, 16384, 1056)
    assert PLANNER.requires_partial_group_offload == (True, True, True, False)
    assert PLANNER.requires_partial_group_offload_any is True
    assert PLANNER.group_hash_factors == (1024, 1024, 1024, 66)
    assert PLANNER.first_hashable_chunk_idx == 0


def test_a_block_that_the_chunk_does_not_divide_stays_whole() -> None:
    assert WHOLE.offload_unit_sizes == (16384, 50000, 1056)
    assert WHOLE.requires_partial_group_offload == (True, False, False)
    assert WHOLE.first_hashable_chunk_idx == 3
    assert HybridOffloadPlanner(16, (16, 1056), 16384).requires_partial_group_offload_any is False


def test_chunks_are_counted_from_the_first_with_a_whole_unit_of_every_group() -> None:
    assert WHOLE.group_covered_tokens_for_chunk_count(0) == (0, 0, 0)
    assert WHOLE.group_covered_tokens_for_chunk_count(1) == (65536, 50000, 65472)
    assert WHOLE.chunk_prefix_tokens(1) == WHOLE.chunk_prefix_tokens(2) == 50000


def test_a_unit_that_is_not_whole_hash_blocks_has_no_factor() -> None:
    planner = HybridOffloadPlanner(1056, (65536, 1056), 16384)
    assert planner.group_hash_factors == (None, 1)
    assert planner.chunk_prefix_tokens(1) == 15840


def test_a_prefix_is_covered_by_every_group_in_whole_hash_blocks() -> None:
    assert PLANNER.group_covered_tokens_for_chunk_count(1) == (16384, 16384, 16384, 15840)
    assert [PLANNER.chunk_prefix_tokens(n) for n in (0, 1, 2, 4)] == [0, 15840, 32736, 65472]


def test_chunk_counts_invert_their_prefixes() -> None:
    counts = {0: 0, 15839: 0, 15840: 1, 32735: 1, 32736: 2}
    assert {tokens: PLANNER.chunk_count_for_tokens(tokens) for tokens in counts} == counts


def test_a_storable_prefix_is_whole_units_of_every_group() -> None:
    prefixes = {0: 0, 1: 0, 10_000: 0, 16_384: 15_840, 20_000: 16_384, 33_000: 32_736}
    assert {tokens: PLANNER.storable_prefix_tokens(tokens) for tokens in prefixes} == prefixes


def test_a_loadable_prefix_is_as_long_as_the_shortest_group() -> None:
    assert PLANNER.loadable_prefix_tokens((16384, 16384, 16384, 15840)) == 15840
    assert PLANNER.loadable_prefix_tokens((16384, 0, 16384, 15840)) == 0


def test_sixty_four_groups_of_coprime_blocks_make_a_prefix() -> None:
    planner = HybridOffloadPlanner(1, tuple(range(101, 165)), 100)
    assert planner.offload_unit_sizes == tuple(range(101, 165))
    assert planner.chunk_prefix_tokens(1) == min(200 // u * u for u in range(101, 165))


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("hash_block_size", (0, (16,), 16)),
        ("hash_block_size", (16.0, (16,), 16)),
        ("fixed_chunk_size", (16, (16,), 0)),
        ("fixed_chunk_size", (16, (16,), -1)),
        ("fixed_chunk_size", (1056, (1056,), 1024)),
        ("gpu_block_sizes", (16, (), 16)),
        (r"gpu_block_sizes\[1\]", (16, (16, 0), 16)),
    ],
)
def test_a_bad_size_is_refused_by_name(field: str, sizes: tuple) -> None:
    with pytest.raises(ValueError, match=field):
        HybridOffloadPlanner(*sizes)


def test_negative_tokens_are_refused_by_name() -> None:
    for field, call in (
        ("chunk_count", lambda: PLANNER.chunk_prefix_tokens(-1)),
        ("tokens", lambda: PLANNER.chunk_count_for_tokens(-1)),
        ("tokens", lambda: PLANNER.storable_prefix_tokens(-1)),
        ("per_group", lambda: PLANNER.loadable_prefix_tokens((1,))),
        (r"per_group\[3\]", lambda: PLANNER.loadable_prefix_tokens((1, 1, 1, -1))),
    ):
        with pytest.raises(ValueError, match=field):
            call()


def test_a_planner_is_a_frozen_value() -> None:
    assert HybridOffloadPlanner(16, [65536, 1056], 16384) == HybridOffloadPlanner(16, (65536, 1056), 16384)
    assert len({PLANNER, PLANNER.with_chunk(16384), WHOLE}) == 2
    with pytest.raises(AttributeError):
        PLANNER.hash_block_size = 1


STATES = HybridOffloadPlanner(16, (65536, 65536, 1056), 65536, unsplittable=(1, 0))


def test_an_unsplittable_block_is_its_own_unit_and_the_others_follow_the_chunk() -> None:
    assert STATES.offload_unit_sizes == (65536, 65536, 32)
    assert STATES.requires_partial_group_offload == (False, False, True)
    assert STATES.unsplittable == (0, 1)
    assert PLANNER.offload_unit_sizes[0] == 16384  # not marked as a state
    small = STATES.with_chunk(16384)
    assert small.offload_unit_sizes == (65536, 65536, 32) and small.first_hashable_chunk_idx == 3


def test_boundaries_are_multiples_of_every_unsplittable_block() -> None:
    assert STATES.boundary_unit == 65536
    assert [STATES.chunk_prefix_tokens(n) for n in (0, 1, 2)] == [0, 65536, 131072]
    assert STATES.storable_prefix_tokens(131071) == 65536
    planner = HybridOffloadPlanner(8, (48, 32, 40), 96, unsplittable=(0, 1))
    assert planner.boundary_unit == 96 and planner.offload_unit_sizes == (48, 32, 8)
    assert planner.loadable_prefix_tokens((144, 128, 120)) == 96


@pytest.mark.parametrize("unsplittable", [(2,), (-1,), (0, 5)])
def test_a_missing_group_cannot_be_unsplittable(unsplittable: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="unsplittable must name some of 2 groups"):
        HybridOffloadPlanner(16, (64, 64), 64, unsplittable)


@given(caches(cuts=True), st.integers(1, 60), st.sampled_from([1, 2, 4]), st.integers(0, 300))
def test_a_planner_of_groups_agrees_with_their_cache(spec: CacheSpec, chunk: int, hash_block: int, tokens: int) -> None:
    planner = HybridOffloadPlanner.of_groups(spec.groups, hash_block, chunk)
    is_misaligned = Problem.MISALIGNED_CHUNK in {finding.problem for finding in diagnose(planner, 1 << 20)}
    try:
        cache = CacheSpec(spec.groups, chunk)
    except ValueError:
        assert is_misaligned
        return
    assert is_misaligned == (chunk % hash_block != 0)
    if not is_misaligned:
        units = [math.gcd(group.block_tokens, chunk) for group in spec.groups]
        assert planner.offload_unit_sizes == tuple(units)
        cut = tuple(i for i, partial in enumerate(planner.requires_partial_group_offload) if partial)
        assert cache.cut_groups == cut
        assert planner.chunk_prefix_tokens(3) == planner.chunk_end_tokens(3) == 3 * cache.boundary_tokens
        assert planner.storable_prefix_tokens(tokens) >= tokens // chunk * chunk


@given(planners(), st.integers(0, 2000))
def test_a_count_is_the_most_chunks_with_a_prefix_that_fits(planner: HybridOffloadPlanner, tokens: int) -> None:
    count = 0
    while planner.chunk_prefix_tokens(count + 1) <= tokens:
        count += 1
    assert planner.chunk_count_for_tokens(tokens) == count


@given(planners(), st.integers(0, 60))
def test_a_prefix_follows_from_its_chunk_count(planner: HybridOffloadPlanner, count: int) -> None:
    prefix = planner.chunk_prefix_tokens(count)
    assert planner.chunk_count_for_tokens(prefix) >= count
    assert planner.chunk_prefix_tokens(planner.chunk_count_for_tokens(prefix)) == prefix
    assert prefix <= min(planner.group_covered_tokens_for_chunk_count(count))
    assert prefix % planner.hash_block_size == 0


@given(planners(), st.integers(0, 2000))
def test_a_storable_prefix_is_loadable_and_never_longer_than_computed(
    planner: HybridOffloadPlanner, tokens: int
) -> None:
    storable = planner.storable_prefix_tokens(tokens)
    assert 0 <= storable <= tokens
    assert storable == planner.loadable_prefix_tokens([tokens // u * u for u in planner.offload_unit_sizes])
    assert storable <= planner.storable_prefix_tokens(tokens + 1)
