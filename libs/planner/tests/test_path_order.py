"""Path order: every chunk comes after those it needs, so any leading part of it can be resumed."""

from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, caches

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    Hit,
    LookupResult,
    chunk_span,
    longest_hit,
    path_order,
)

HYBRID = CacheSpec(
    (
        GroupSpec(GroupKind.RECURRENT, 64),
        GroupSpec(GroupKind.WINDOW, 16, window_tokens=33),
        GroupSpec(GroupKind.FULL, 16),
        GroupSpec(GroupKind.FULL, 64),
    ),
    chunk_tokens=64,
)


def whole_path(spec: CacheSpec) -> list[tuple[int, int]]:
    ends = range(spec.chunk_tokens, CHUNKS * spec.chunk_tokens + 1, spec.chunk_tokens)
    return [(group, end) for group in spec.stored_groups for end in ends if chunk_span(spec, group, end).num_tokens]


def resumable(spec: CacheSpec, parts: set[tuple[int, int]]) -> int:
    def lookup(group_index: int, end_token: int) -> LookupResult:
        return LookupResult.HIT if (group_index, end_token) in parts else LookupResult.MISS

    num_tokens = CHUNKS * spec.chunk_tokens + 1 + spec.lookahead_tokens
    answer = longest_hit(spec, num_tokens, 0, lookup)
    return answer.num_tokens if isinstance(answer, Hit) else 0


@given(st.one_of(caches(), caches(cuts=True)), st.data())
def test_a_leading_part_of_the_order_can_be_resumed_to_its_end(spec: CacheSpec, data: st.DataObject) -> None:
    """Read in reverse, this is eviction: whatever number of chunks goes, the rest is usable."""
    order = path_order(spec, whole_path(spec))
    kept = order[: data.draw(st.integers(0, len(order)))]
    missing = order[len(kept) :]
    whole_until = missing[0][1] - spec.chunk_tokens if missing else CHUNKS * spec.chunk_tokens
    # Where CHUNKED groups need nothing, more may be resumable.
    assert resumable(spec, set(kept)) >= whole_until


def test_evicting_states_and_windows_first_leaves_nothing_to_resume() -> None:
    """Negative control: states and windows of a whole path go first, until half of it is gone."""
    path = whole_path(HYBRID)
    by_kind = sorted(path, key=lambda part: (HYBRID.groups[part[0]].kind is GroupKind.FULL, -part[1]))
    num_gone = len(path) // 2
    assert resumable(HYBRID, set(by_kind[num_gone:])) == 0
    assert resumable(HYBRID, set(path_order(HYBRID, path)[: len(path) - num_gone])) == CHUNKS // 2 * 64
