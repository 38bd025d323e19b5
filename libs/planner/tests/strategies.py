"""Small caches and stores for property tests."""

from hypothesis import strategies as st

from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, LookupResult, chunk_unit, whole_chunk_unit

CHUNKS = 8
"""Prompts are at most this many chunks long, so that exhaustive search is cheap."""

Store = dict[tuple[int, int], LookupResult]


@st.composite
def groups(draw: st.DrawFn, cuts: bool = False) -> GroupSpec:
    kind = draw(st.sampled_from([GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNKED, GroupKind.RECURRENT]))
    block_tokens = draw(st.sampled_from([1, 2, 3, 4, 8]))
    parts = [part for part in (1, 2, 3, 4, None) if part is None or block_tokens % part == 0]
    return GroupSpec(
        kind=kind,
        block_tokens=block_tokens,
        window_tokens=draw(st.integers(1, 40)) if kind is GroupKind.WINDOW else None,
        align_tokens=draw(st.integers(1, 40)) if kind is GroupKind.CHUNKED else None,
        lookahead_tokens=draw(st.sampled_from([0, 0, 0, 1, 4])) if kind is not GroupKind.RECURRENT else 0,
        part_tokens=draw(st.sampled_from(parts)) if cuts and kind in (GroupKind.FULL, GroupKind.WINDOW) else None,
    )


@st.composite
def caches(draw: st.DrawFn, tails: bool = False, cuts: bool = False) -> CacheSpec:
    """With `tails`, boundaries inside chunks; with `cuts`, chunks that mostly end inside blocks."""
    chosen = tuple(draw(st.lists(groups(cuts), min_size=1, max_size=5)))
    chunk = chunk_unit(chosen) * draw(st.integers(1, 5 if cuts else 2))
    divisors = [d for d in range(1, chunk + 1) if chunk % d == 0][-4:]
    return CacheSpec(chosen, chunk, draw(st.sampled_from(divisors)) if tails else None)


any_caches = st.one_of(caches(), caches(tails=True), caches(cuts=True))


def computed_tokens(spec: CacheSpec, most: int) -> st.SearchStrategy[int]:
    """Tokens that an engine may hold: whole blocks, which makes a difference only where chunks cut some."""
    unit = whole_chunk_unit(spec.groups) if spec.cut_groups else 1
    return st.integers(0, max(0, most) // unit).map(lambda count: count * unit)


def boundaries(spec: CacheSpec) -> range:
    """Every boundary of the longest prompt."""
    return range(spec.boundary_tokens, CHUNKS * spec.chunk_tokens + 1, spec.boundary_tokens)


@st.composite
def stores(draw: st.DrawFn, spec: CacheSpec) -> Store:
    """A tier's answer for every part of every chunk and tail; mostly stored, so that hits have all lengths."""
    answers = st.sampled_from([LookupResult.HIT] * 6 + [LookupResult.MISS, LookupResult.PENDING])
    store = {(group, end): draw(answers) for group in spec.stored_groups for end in boundaries(spec)}
    for group in spec.stored_groups:
        if draw(st.booleans()):  # nothing from here on, as where prompts diverge
            part = draw(st.integers(0, CHUNKS)) * spec.chunk_tokens
            store |= {(group, end): LookupResult.MISS for end in boundaries(spec) if end > part}
    return store


class Ranges:
    """Tier that answers ranges, as `RangeLookup` defines them; counts the queries."""

    def __init__(self, spec: CacheSpec, store: Store) -> None:
        self.spec, self.store, self.questions = spec, store, 0

    def answers(self, group_index: int, first_end: int, last_end: int, step: int) -> list[tuple[int, LookupResult]]:
        self.questions += 1
        assert first_end % step == last_end % step == 0 and first_end > 0
        ends = range(first_end, last_end + 1, step)
        return [(end, self.store.get((group_index, end), LookupResult.MISS)) for end in ends]

    def num_leading_held(self, group_index: int, first_end: int, last_end: int) -> int:
        count = 0
        for _, answer in self.answers(group_index, first_end, last_end, self.spec.chunk_tokens):
            if answer is LookupResult.MISS:
                break
            count += 1
        return count

    def last_held(self, group_index: int, first_end: int, last_end: int) -> int:
        answers = self.answers(group_index, first_end, last_end, self.spec.boundary_tokens)
        return max((end for end, answer in answers if answer is not LookupResult.MISS), default=0)

    def any_pending(self, group_index: int, first_end: int, last_end: int) -> bool:
        answers = self.answers(group_index, first_end, last_end, self.spec.chunk_tokens)
        assert all(answer is not LookupResult.MISS for _, answer in answers)
        return any(answer is LookupResult.PENDING for _, answer in answers)
