"""Search for the longest hit: the longest prefix at which every group can resume. Looks up as few chunks as possible.

The search starts at the last boundary. Each group can only lower the boundary; the search ends when no group lowers
it. Three rules keep the lookups few:

- Scarce kinds (states and windows) are looked up first: they need one key or a few keys for a boundary. FULL groups are
  looked up last, once, and only up to the boundary that the other groups allow.
- In a tier without ranges, a window is looked up from its first chunk. If this chunk is missing, no boundary that reads
  it can be a hit. So in a new prompt, one lookup rules out as many tokens as the window has.
- After many misses of scarce kinds, a few lookups of the FULL groups lower the boundary. In a tier that answers ranges,
  and without tails, the first chunk of the first FULL group after the engine's own prefix is looked up before all
  others: without it there is no hit.

After a search, `measure_loss` returns the tokens that the FULL groups hold beyond the hit.
"""

from functools import partial

import msgspec

from hybridkv.planner.coverage import load_start, needed_ends, read_start, resume_start
from hybridkv.planner.groups import CacheSpec, GroupKind
from hybridkv.planner.lookup import Lookup, LookupResult, RangeLookup, Scan, find_missing, is_held

# In CPython 3.11, access to an enum member takes longer than most other operations of a search.
_FULL, _WINDOW, _CHUNKED, _RECURRENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNKED, GroupKind.RECURRENT
_MAX_RULED_OUT = 16
"""After scarce kinds rule out this number of boundaries, a few lookups of the FULL groups are worth their cost."""


class Hit(msgspec.Struct, frozen=True, tag=True):
    """Every group can resume at `num_tokens`, after the engine's own prefix."""

    num_tokens: int


class Pending(msgspec.Struct, frozen=True, tag=True):
    """Every group can resume at `num_tokens` after chunks in flight arrive: search again later."""

    num_tokens: int


class Miss(msgspec.Struct, frozen=True, tag=True):
    """No hit beyond the engine's own prefix.

    Args:
        limiting_group: the group that ruled out all boundaries that the other groups had left; None if the request has
            no boundary beyond the engine's own prefix.
        reason: the reason, as text.
    """

    limiting_group: int | None
    reason: str


def last_boundary(spec: CacheSpec, num_tokens: int) -> int:
    """Last boundary at which a request of `num_tokens` can resume; 0 if there is none.

    The last token is always computed, and the request must contain the lookahead tokens after the boundary.
    """
    return max(0, num_tokens - max(1, spec.lookahead_tokens)) // spec.boundary_tokens * spec.boundary_tokens


def longest_hit(
    spec: CacheSpec, num_tokens: int, computed_tokens: int, lookup: Lookup, ranges: RangeLookup | None = None
) -> Hit | Pending | Miss:
    """Longest boundary at which all groups can resume.

    Without `ranges`, looks up no key twice, and at most one key per boundary in each group: O(chunks), with tails
    O(num_tokens / tail_tokens). If all groups are FULL and there are no tails, each group costs at most one lookup more
    than it holds chunks.

    Args:
        spec: the model's groups.
        num_tokens: tokens of the request; the last one is always recomputed.
        computed_tokens: the prefix that the engine holds itself; a hit that is not longer is a miss.
        lookup: looks up the end of a chunk, a multiple of `spec.chunk_tokens`, or of a tail if tails are stored.
        ranges: looks up many chunks at once, if the tier can. It must agree with `lookup`, which is then called for
            tails only. A few calls per group are enough for prefixes without holes, and O(log) more if states or
            windows are missing. Holes in windows cost one call each, at most O(chunks), and tails O(boundaries). Ranges
            are kept short and looked up late, because a tier may compute a key for every chunk in them.

    Returns:
        Hit or Pending with a boundary above `computed_tokens`, or Miss.

    Raises:
        ValueError: a number of tokens is negative.
    """
    if num_tokens < 0 or computed_tokens < 0:
        raise ValueError(f"tokens must not be negative, got num_tokens={num_tokens}, computed_tokens={computed_tokens}")
    boundary = last_boundary(spec, num_tokens)
    limiting: int | None = None
    if boundary > computed_tokens:
        search = _HitSearch(spec, computed_tokens, lookup, ranges)
        boundary, limiting = search.longest_boundary(boundary)
        if boundary > computed_tokens:
            return Pending(boundary) if search.is_pending(boundary) else Hit(boundary)
    return _miss(spec, num_tokens, computed_tokens, limiting)


class _HitSearch:
    """One search. Boundaries are multiples of `spec.boundary_tokens`."""

    def __init__(self, spec: CacheSpec, computed_tokens: int, lookup: Lookup, ranges: RangeLookup | None) -> None:
        self._spec = spec
        self._chunk, self._step = spec.chunk_tokens, spec.boundary_tokens
        self._computed = computed_tokens
        # If no chunk cuts a block, the first read token and the start of its block lie in the same chunk.
        self._first_read_token_of = load_start if spec.cut_groups else read_start
        if ranges is None:
            scan = Scan(spec, lookup)
            self._lookup: Lookup = scan.answer
            self._ranges: RangeLookup = scan
        else:
            self._lookup, self._ranges = lookup, ranges
        self._has_ranges = ranges is not None
        # Without tails, a window of two tokens or more reads the chunk before each boundary. With tails, it may read
        # only the tail.
        self._has_plain_windows = spec.tail_tokens is None
        self._order = spec.scarce_first
        self._lowest = (computed_tokens // self._step + 1) * self._step
        self._held_up_to = [computed_tokens // self._chunk * self._chunk] * len(spec.groups)
        """For each FULL group, the token up to which it holds every chunk, as far as known."""
        self._patience = _MAX_RULED_OUT
        self._bounding: int | None = None
        """FULL group that lowered the boundary in the last `_lower` of another group; None if no FULL group did."""

    def longest_boundary(self, boundary: int) -> tuple[int, int | None]:
        """Longest boundary that no group rules out, and the group that lowered the search to it; None if none did."""
        limiting = self._spec.first_full
        if limiting is not None and not self._look_up_first_chunk(limiting, boundary):
            return self._computed, limiting
        limiting = None
        settled = False
        while boundary > self._computed and not settled:
            settled = True
            for group_index in self._order:
                lowered = self._lower(group_index, boundary)
                if lowered < boundary:
                    limiting = group_index if self._bounding is None else self._bounding
                    boundary, settled, self._bounding = lowered, False, None
                    break
        return boundary, limiting

    def _look_up_first_chunk(self, group_index: int, boundary: int) -> bool:
        """False if a FULL group lacks the first chunk after the engine's own prefix, which every boundary needs.

        Returns True without a lookup if the tier has no ranges, if tails are stored, or if the boundary lies before the
        end of the chunk.
        """
        first = self._held_up_to[group_index] + self._chunk
        if not self._has_ranges or self._step != self._chunk or first > boundary:
            return True
        if not self._ranges.num_leading_held(group_index, first, first):
            return False
        self._held_up_to[group_index] = first
        return True

    def _lower(self, group_index: int, boundary: int) -> int:
        """Looks up chunks of this group. Returns the longest boundary up to `boundary` that the found misses allow. If
        none after `_computed` is left, returns any boundary up to `_computed`."""
        kind = self._spec.groups[group_index].kind
        if kind is _RECURRENT:
            return self._lower_to_state(group_index, boundary)
        chunk = self._chunk
        last = boundary // chunk * chunk
        if boundary > last and resume_start(self._spec.groups[group_index], boundary) < boundary:
            # A CHUNKED group may read nothing at the previous boundary, so a missing tail rules out only this one.
            first = boundary if kind is _CHUNKED else max(last + self._step, self._lowest)
            tail = self._ranges.last_held(group_index, first, boundary)
            if tail != boundary:
                return self._bounded_by_full(tail or first - self._step)
        if kind is _FULL:
            return self._lower_to_prefix(group_index, boundary)
        return self._lower_to_window(group_index, boundary)

    def _lower_to_state(self, group_index: int, boundary: int) -> int:
        """`_lower` for a group that needs one key at each boundary: a state, or the last chunk of a window."""
        if self._patience:
            nearest = max(self._lowest, boundary - (self._patience - 1) * self._step)
            found = self._ranges.last_held(group_index, nearest, boundary)
            if found or nearest == self._lowest:
                return found
            self._patience = 1
            return self._bounded_by_full(nearest - self._step)
        return self._ranges.last_held(group_index, self._lowest, boundary)

    def _lower_to_window(self, group_index: int, boundary: int) -> int:
        chunk, step = self._chunk, self._step
        last = boundary // chunk * chunk
        start = self._first_read_token_of(self._spec.groups[group_index], boundary, self._computed)
        if start >= last:
            return boundary
        first = (start // chunk + 1) * chunk
        if self._has_plain_windows and self._spec.groups[group_index].kind is _WINDOW:
            if first == last:
                return self._lower_to_state(group_index, boundary)
            if self._has_ranges:
                found = self._lower_to_state(group_index, last)
                if found < last:
                    return found
        num_held = self._ranges.num_leading_held(group_index, first, last)
        if first + num_held * chunk > last:
            return boundary
        return self._bounded_by_full(first + num_held * chunk - step)

    def _lower_to_prefix(self, group_index: int, boundary: int) -> int:
        chunk = self._chunk
        last = boundary // chunk * chunk
        first = self._held_up_to[group_index] + chunk
        if first > last:
            return boundary
        num_held = self._ranges.num_leading_held(group_index, first, last)
        walked = self._held_up_to[group_index] = first - chunk + num_held * chunk
        return boundary if walked >= last else walked + chunk - self._step

    def _bounded_by_full(self, boundary: int) -> int:
        """Counts `_patience` down, and returns `boundary`.

        When `_patience` reaches 0, looks up FULL groups. If one ends before `boundary`, returns its end and sets
        `_bounding`.
        """
        if self._patience == 0:
            return boundary
        self._patience -= 1
        if self._patience:
            return boundary
        chunk = self._chunk
        for group_index in self._order:
            if self._spec.groups[group_index].kind is _FULL and boundary > self._computed:
                first = self._held_up_to[group_index] + chunk
                missing = find_missing(partial(self._is_held, group_index), first, boundary // chunk * chunk, chunk)
                if missing is not None:
                    boundary, self._bounding = missing - self._step, group_index
        return boundary

    def _is_held(self, group_index: int, end_token: int) -> bool:
        if self._has_ranges:
            return self._ranges.num_leading_held(group_index, end_token, end_token) > 0
        return self._lookup(group_index, end_token) is not LookupResult.MISS

    def is_pending(self, boundary: int) -> bool:
        """True if a chunk that `boundary`, the result of this search, needs is not readable yet."""
        chunk = self._chunk
        last = boundary // chunk * chunk
        for group_index in self._order:
            group = self._spec.groups[group_index]
            start = self._first_read_token_of(group, boundary, self._computed)
            if start < last and self._ranges.any_pending(group_index, (start // chunk + 1) * chunk, last):
                return True
            reads_tail = max(start, last) < boundary
            if reads_tail and self._lookup(group_index, boundary) is LookupResult.PENDING:
                return True
        return False


def _miss(spec: CacheSpec, num_tokens: int, computed_tokens: int, limiting: int | None) -> Miss:
    if limiting is None:
        return Miss(
            None,
            f"{num_tokens} tokens have no boundary of {spec.boundary_tokens} tokens beyond the {computed_tokens} held",
        )
    kind = spec.groups[limiting].kind.name
    return Miss(limiting, f"group {limiting} ({kind}) is not stored beyond the {computed_tokens} tokens held")


class Loss(msgspec.Struct, frozen=True):
    """Tokens that the FULL groups hold beyond the boundary of the hit.

    Args:
        resumed_tokens: boundary of the hit, or the engine's own prefix for a miss.
        full_tokens: last boundary that every FULL group holds; `resumed_tokens` or more.
        limiting_group: group that rules out the first boundary beyond `resumed_tokens` that the FULL groups hold; None
            if nothing is lost. Of several groups, the first of `CacheSpec.scarce_first`.
    """

    resumed_tokens: int
    full_tokens: int
    limiting_group: int | None

    @property
    def lost_tokens(self) -> int:
        return self.full_tokens - self.resumed_tokens if self.limiting_group is not None else 0


def measure_loss(
    spec: CacheSpec,
    num_tokens: int,
    computed_tokens: int,
    resumed_tokens: int,
    lookup: Lookup,
    ranges: RangeLookup | None = None,
) -> Loss:
    """Measures the loss of a request after its search.

    Looks up FULL groups beyond the hit up to the first miss, and then the other groups at one boundary.

    Args:
        spec: the model's groups. Without a FULL group the loss is always 0.
        num_tokens: tokens of the request, as given to `longest_hit`.
        computed_tokens: the prefix that the engine holds itself.
        resumed_tokens: the boundary of the hit, `computed_tokens` for a miss.
        lookup: the same as for `longest_hit`. Pending counts as held.
        ranges: the same as for `longest_hit`.

    Raises:
        ValueError: `computed_tokens` is negative, or `resumed_tokens` is before the engine's own prefix or after the
            end of the request.
    """
    if not 0 <= computed_tokens <= resumed_tokens <= num_tokens:
        raise ValueError(
            f"expected 0 <= computed_tokens <= resumed_tokens <= num_tokens, "
            f"got {computed_tokens}, {resumed_tokens}, {num_tokens}"
        )
    full = _full_tokens(spec, num_tokens, resumed_tokens, lookup, ranges or Scan(spec, lookup))
    limiting = None
    if full > resumed_tokens:
        following = _next_full(spec, resumed_tokens, full, lookup)
        limiting = _limiting_group(spec, following, computed_tokens, lookup)
    return Loss(resumed_tokens, full, limiting)


def _full_groups(spec: CacheSpec) -> list[int]:
    return [index for index in spec.stored_groups if spec.groups[index].kind is GroupKind.FULL]


def _next_full(spec: CacheSpec, resumed_tokens: int, full_tokens: int, lookup: Lookup) -> int:
    """First boundary beyond `resumed_tokens` that every FULL group holds; `full_tokens` is the last one."""
    full_groups, step = _full_groups(spec), spec.boundary_tokens
    boundary = (resumed_tokens // step + 1) * step
    while (
        boundary < full_tokens
        and boundary % spec.chunk_tokens
        and not all(is_held(lookup(index, boundary)) for index in full_groups)
    ):
        boundary += step
    return boundary


def _full_tokens(spec: CacheSpec, num_tokens: int, resumed_tokens: int, lookup: Lookup, ranges: RangeLookup) -> int:
    full_groups = _full_groups(spec)
    last, chunk, step = last_boundary(spec, num_tokens), spec.chunk_tokens, spec.boundary_tokens
    if not full_groups or last <= resumed_tokens:
        return resumed_tokens
    start = resumed_tokens // chunk * chunk
    end = last // chunk * chunk
    for index in full_groups:
        if end > start:
            end = start + ranges.num_leading_held(index, start + chunk, end) * chunk
    tails = range(min(last, end + chunk - step), max(end, resumed_tokens), -step)
    for tail in tails:
        if all(is_held(lookup(index, tail)) for index in full_groups):
            return tail
    return max(resumed_tokens, end)


def _limiting_group(spec: CacheSpec, boundary: int, computed_tokens: int, lookup: Lookup) -> int | None:
    for index in spec.scarce_first:
        if spec.groups[index].kind is GroupKind.FULL:
            continue
        ends = needed_ends(spec, index, boundary, computed_tokens)
        if not all(is_held(lookup(index, end)) for end in reversed(ends)):
            return index
    return None
