import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.planner import HybridOffloadPlanner, Problem, diagnose
from hybridkv.planner.diagnosis import tokens_for_first_hit


def problems(planner: HybridOffloadPlanner, max_model_len: int) -> dict[Problem, object]:
    return {finding.problem: finding for finding in diagnose(planner, max_model_len)}


def test_a_valid_configuration_has_no_findings() -> None:
    assert diagnose(HybridOffloadPlanner(16, (65536, 65536, 65536, 1056), 16384), 98304) == ()


def test_an_unsplittable_group_is_named_with_the_tokens_it_needs() -> None:
    [finding] = diagnose(HybridOffloadPlanner(16, (50000, 1056), 16384), 98304)
    assert finding.problem is Problem.UNSPLIT_GROUP
    assert finding.group_index == 0 and finding.needed_tokens == 50000
    assert finding.nearest_chunk_tokens == 10000
    assert "group 0 cannot be split" in finding.message and "use a chunk of 10000 tokens" in finding.message


def test_a_chunk_that_would_leave_another_group_whole_is_not_suggested() -> None:
    [finding] = diagnose(HybridOffloadPlanner(16, (65536, 50000, 1056), 16384), 98304)
    assert finding.group_index == 1
    assert finding.nearest_chunk_tokens == 16  # 10,000 is nearer, and leaves group 0 whole
    [finding] = diagnose(HybridOffloadPlanner(32, (65536, 50000, 1056), 16384), 98304)[:1]
    assert finding.nearest_chunk_tokens is None
    assert "no chunk that splits this group" in finding.message and "keeps the other split" in finding.message


def test_a_chunk_beyond_max_model_len_is_not_suggested() -> None:
    found = problems(HybridOffloadPlanner(16, (16144,), 10000), 12000)
    assert found[Problem.UNSPLIT_GROUP].nearest_chunk_tokens == 16
    assert found[Problem.OFFLOAD_DISABLED].nearest_chunk_tokens == 16
    found = problems(HybridOffloadPlanner(17, (16144,), 10000), 12000)
    assert {finding.nearest_chunk_tokens for finding in found.values()} == {None}


def test_a_chunk_beyond_max_model_len_disables_offload_and_names_the_nearest() -> None:
    finding = problems(HybridOffloadPlanner(16, (16, 1056), 16384), 8192)[Problem.OFFLOAD_DISABLED]
    assert finding.nearest_max_model_len == finding.needed_tokens == 16384
    assert finding.nearest_chunk_tokens == 8192
    assert "max_model_len is 8192" in finding.message


def test_a_state_as_long_as_the_model_disables_offload_unless_it_is_split() -> None:
    found = problems(HybridOffloadPlanner(16, (98304, 1056), 16000), 98304)
    assert "never reaches" in found[Problem.UNSPLIT_GROUP].message
    disabled = found[Problem.OFFLOAD_DISABLED]
    assert disabled.needed_tokens == 7 * 16000
    assert disabled.nearest_chunk_tokens == 16384


def test_a_length_without_any_working_chunk_says_so() -> None:
    finding = problems(HybridOffloadPlanner(16, (17,), 32), 16)[Problem.OFFLOAD_DISABLED]
    assert finding.nearest_chunk_tokens is None and "no chunk works" in finding.message


def test_units_that_are_no_multiple_of_hash_blocks_are_found() -> None:
    assert problems(HybridOffloadPlanner(16, (24,), 64), 4096)[Problem.UNHASHABLE_UNIT].group_index == 0


def test_a_chunk_that_ends_inside_a_state_is_found_with_the_nearest() -> None:
    planner = HybridOffloadPlanner(16, (65536, 65536, 1056), 16384, unsplittable=(0, 1))
    finding = problems(planner, 98304)[Problem.MISALIGNED_CHUNK]
    assert finding.needed_tokens == 65537 and finding.nearest_chunk_tokens == 65536
    assert "multiple of 65536" in finding.message and "use a chunk of 65536 tokens" in finding.message
    assert diagnose(planner.with_chunk(65536), 98304) == ()
    [finding, *_] = diagnose(planner, 65536)
    assert finding.nearest_chunk_tokens is None and "no chunk works" in finding.message


def test_max_model_len_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        diagnose(HybridOffloadPlanner(16, (16,), 16), 0)


@st.composite
def whole_planners(draw: st.DrawFn) -> HybridOffloadPlanner:
    """With known unsplittable blocks."""
    hash_block = draw(st.integers(1, 8))
    blocks = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=4))
    whole = draw(st.sets(st.sampled_from(range(len(blocks)))))
    return HybridOffloadPlanner(
        hash_block, tuple(hash_block * n for n in blocks), draw(st.integers(1, 120)), tuple(whole)
    )


planners = st.one_of(
    whole_planners(),
    st.builds(
        HybridOffloadPlanner,
        st.integers(1, 8),
        st.lists(st.integers(1, 100), min_size=1, max_size=4).map(tuple),
        st.integers(8, 120),
    ),
)


def places(planner: HybridOffloadPlanner, max_model_len: int) -> set[tuple[Problem, int | None]]:
    return {(finding.problem, finding.group_index) for finding in diagnose(planner, max_model_len)}


@given(planners, st.integers(1, 200))
def test_following_a_suggestion_removes_the_finding_and_adds_none(
    planner: HybridOffloadPlanner, max_model_len: int
) -> None:
    before = places(planner, max_model_len)
    for finding in diagnose(planner, max_model_len):
        place = (finding.problem, finding.group_index)
        if finding.nearest_chunk_tokens is not None:
            assert finding.nearest_chunk_tokens <= max_model_len
            assert f"use a chunk of {finding.nearest_chunk_tokens} tokens" in finding.message
            after = places(planner.with_chunk(finding.nearest_chunk_tokens), max_model_len)
            assert place not in after and after <= before
            assert (Problem.OFFLOAD_DISABLED, None) not in after
        elif finding.problem is not Problem.UNHASHABLE_UNIT:
            assert "no chunk" in finding.message
        if finding.nearest_max_model_len is not None:
            after = places(planner, finding.nearest_max_model_len)
            assert place not in after and after <= before


@given(planners, st.integers(1, 200))
def test_no_working_chunk_is_nearer_than_the_suggested_one(planner: HybridOffloadPlanner, max_model_len: int) -> None:
    before = places(planner, max_model_len)
    chunks = range(planner.hash_block_size, max_model_len + 1, planner.hash_block_size)
    after = {chunk: places(planner.with_chunk(chunk), max_model_len) for chunk in chunks}
    never = {(Problem.OFFLOAD_DISABLED, None), (Problem.MISALIGNED_CHUNK, None)}
    works = [chunk for chunk in chunks if after[chunk] <= before and not after[chunk] & never]
    for finding in diagnose(planner, max_model_len):
        splits = works
        if finding.problem is Problem.UNSPLIT_GROUP:
            block = planner.gpu_block_sizes[finding.group_index]
            splits = [chunk for chunk in works if chunk < block and block % chunk == 0]
        if finding.problem is not Problem.UNHASHABLE_UNIT:
            nearest = min(splits, key=lambda chunk: (abs(chunk - planner.fixed_chunk_size), chunk), default=None)
            assert finding.nearest_chunk_tokens == nearest


@given(planners, st.integers(1, 200))
def test_offload_is_disabled_where_no_prompt_is_long_enough_for_a_first_hit(
    planner: HybridOffloadPlanner, max_model_len: int
) -> None:
    found = problems(planner, max_model_len).get(Problem.OFFLOAD_DISABLED)
    assert (found is None) == (tokens_for_first_hit(planner) <= max_model_len)
    if found is not None:
        lengths = range(max_model_len, 1000)
        assert found.nearest_max_model_len == next(
            m for m in lengths if Problem.OFFLOAD_DISABLED not in problems(planner, m)
        )
