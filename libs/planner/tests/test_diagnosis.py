import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.planner import HybridOffloadPlanner, Problem, diagnose
from hybridkv.planner.diagnosis import tokens_for_first_hit


def problems(planner: HybridOffloadPlanner, max_model_len: int) -> dict[Problem, object]:
    return {finding.problem: finding for finding in diagnose(planner, max_model_len)}


def test_nothing_is_found_where_all_is_well() -> None:
    assert diagnose(HybridOffloadPlanner(16, (65536, 65536, 65536, 1056), 16384), 98304) == ()


def test_a_group_that_cannot_be_split_is_named_with_the_tokens_it_needs() -> None:
    [finding] = diagnose(HybridOffloadPlanner(16, (65536, 50000, 1056), 16384), 98304)
    assert finding.problem is Problem.UNSPLIT_GROUP
    assert finding.group_index == 1 and finding.needed_tokens == 50000
    assert finding.nearest_chunk_tokens == 10000
    assert "group 1 cannot be split" in finding.message and "use a chunk of 10000 tokens" in finding.message


def test_a_chunk_beyond_max_model_len_disables_offload_and_the_nearest_that_works_is_named() -> None:
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


def test_a_length_that_nothing_works_with_says_so() -> None:
    finding = problems(HybridOffloadPlanner(16, (17,), 32), 16)[Problem.OFFLOAD_DISABLED]
    assert finding.nearest_chunk_tokens is None and "no chunk works" in finding.message


def test_units_that_block_hashes_do_not_name_are_found() -> None:
    assert problems(HybridOffloadPlanner(16, (24,), 64), 4096)[Problem.UNHASHABLE_UNIT].group_index == 0


def test_max_model_len_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        diagnose(HybridOffloadPlanner(16, (16,), 16), 0)


@given(
    st.integers(1, 8),
    st.lists(st.integers(1, 100), min_size=1, max_size=4),
    st.integers(8, 120),
    st.integers(1, 200),
)
def test_every_suggestion_works_and_none_is_nearer(
    hash_block: int, blocks: list[int], chunk: int, max_model_len: int
) -> None:
    planner = HybridOffloadPlanner(hash_block, tuple(blocks), chunk)
    found = problems(planner, max_model_len).get(Problem.OFFLOAD_DISABLED)
    works = [
        other
        for other in range(hash_block, max_model_len + 1, hash_block)
        if tokens_for_first_hit(planner.with_chunk(other)) <= max_model_len
    ]
    if found is None:
        assert tokens_for_first_hit(planner) <= max_model_len
        return
    lengths = range(max_model_len, 1000)
    assert found.nearest_max_model_len == next(
        m for m in lengths if Problem.OFFLOAD_DISABLED not in problems(planner, m)
    )
    assert found.nearest_chunk_tokens == min(works, key=lambda c: (abs(c - chunk), c), default=None)
