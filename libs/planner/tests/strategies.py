"""Small caches and stores for property tests."""

from hypothesis import strategies as st

from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, LookupResult, chunk_unit

CHUNKS = 8
"""Prompts are at most this many chunks long, so that exhaustive search is cheap."""


@st.composite
def groups(draw: st.DrawFn) -> GroupSpec:
    kind = draw(st.sampled_from([GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNKED, GroupKind.RECURRENT]))
    return GroupSpec(
        kind=kind,
        block_tokens=draw(st.sampled_from([1, 2, 3, 4, 8])),
        window_tokens=draw(st.integers(1, 40)) if kind is GroupKind.WINDOW else None,
        align_tokens=draw(st.integers(1, 40)) if kind is GroupKind.CHUNKED else None,
        lookahead_tokens=draw(st.sampled_from([0, 0, 0, 1, 4])) if kind is not GroupKind.RECURRENT else 0,
    )


@st.composite
def caches(draw: st.DrawFn) -> CacheSpec:
    chosen = tuple(draw(st.lists(groups(), min_size=1, max_size=5)))
    return CacheSpec(chosen, chunk_unit(chosen) * draw(st.integers(1, 2)))


@st.composite
def stores(draw: st.DrawFn, spec: CacheSpec) -> dict[tuple[int, int], LookupResult]:
    """What a tier answers for every part of every chunk; mostly stored, so that hits of all lengths come up."""
    answers = st.sampled_from([LookupResult.HIT] * 6 + [LookupResult.MISS, LookupResult.PENDING])
    return {
        (group, (chunk + 1) * spec.chunk_tokens): draw(answers)
        for group in spec.stored_groups
        for chunk in range(CHUNKS)
    }
