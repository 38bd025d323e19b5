import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import caches

from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, HybridOffloadPlanner

STATE, CUT = GroupSpec(GroupKind.RECURRENT, 65536), GroupSpec(GroupKind.FULL, 1056, part_tokens=32)


@pytest.mark.parametrize(
    ("chunk", "nearest"), [(16384, 65536), (65536, 65536), (98303, 65536), (98305, 131072), (1 << 20, 131072)]
)
def test_a_chunk_is_whole_states_and_may_cut_other_blocks(chunk: int, nearest: int) -> None:
    planner = HybridOffloadPlanner((STATE, CUT, GroupSpec(GroupKind.SCRATCH, 7)), 16, 131073)
    assert planner.unit_tokens == 65536
    assert planner.nearest_chunk(chunk) == nearest


def test_no_chunk_works_if_no_prompt_is_longer_than_the_unit() -> None:
    assert HybridOffloadPlanner((STATE, CUT), 16, 65536).nearest_chunk(16384) is None


@given(caches(cuts=True), st.sampled_from([1, 2, 4, 6]), st.integers(1, 300), st.integers(1, 300))
def test_the_nearest_chunk_is_the_nearest_that_the_cache_accepts_and_a_prompt_can_hit(
    spec: CacheSpec, hash_tokens: int, max_model_len: int, wanted: int
) -> None:
    def works(chunk: int) -> bool:
        try:
            CacheSpec(spec.groups, chunk)
        except ValueError:
            return False
        return chunk % hash_tokens == 0

    working = [chunk for chunk in range(1, max_model_len) if works(chunk)]
    nearest = min(working, key=lambda chunk: (abs(chunk - wanted), chunk), default=None)
    assert HybridOffloadPlanner(spec.groups, hash_tokens, max_model_len).nearest_chunk(wanted) == nearest
