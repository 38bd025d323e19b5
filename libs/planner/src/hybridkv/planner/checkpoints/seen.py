"""Table of prefixes of earlier prompts, to compare a request with them.

It records facts that the store does not have: the length of the earlier prompt from which a request diverges, earlier
divergences at the same boundary, and the last use of a prefix. The table is bounded, and so is the cost of one
request, for a prompt of any length (`Grain`). If a prefix is forgotten or skipped, the statistics only have less
data. Keys are opaque. Ages are counted in stored bytes, not in seconds.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from operator import neg
from typing import Final

import msgspec

from hybridkv.planner.checkpoints.experience import KEPT_SHARE, MISSED_SHARE, OLD_SHARE
from hybridkv.planner.checkpoints.values import Placement, Prompt, StopReason, StoreUsage


class Grain(msgspec.Struct, frozen=True):
    """Choice of the boundaries of a prompt that are examined: all boundaries, if there are at most `max_places`.

    Raises:
        ValueError: a number is not positive, or `fine_places` leaves less than two of `max_places`.
    """

    max_places: int = 4096
    """Maximum number of examined boundaries."""
    fine_places: int = 2048
    """All of the last `fine_places` boundaries are examined. More than the longest distance in `DISTANCES`."""
    coarse_step: int = 32
    """Before them, the first boundary and every n-th one are examined; n is this step or a multiple of it."""

    def __post_init__(self) -> None:
        if not 0 < self.fine_places < self.max_places - 1 or self.coarse_step <= 0:
            raise ValueError(f"a grain needs 0 < fine_places < max_places - 1 and a positive step, got {self}")

    def places(self, num_places: int) -> Sequence[int]:
        """Examined boundaries of a prompt with `num_places` boundaries, descending."""
        if num_places <= self.max_places:
            return range(num_places, 0, -1)
        coarse, most = num_places - self.fine_places, self.max_places - self.fine_places - 1
        step = self.coarse_step * -(-coarse // (self.coarse_step * most))
        return tuple(chain(range(num_places, coarse, -1), range(coarse // step * step, 1, -step), (1,)))

    def cell(self, place: int) -> int:
        """Boundary that records a divergence at `place`: the last coarse boundary up to it, or the first boundary."""
        return max(1, place // self.coarse_step * self.coarse_step)

    def next_coarse(self, place: int) -> int:
        """First coarse boundary at or after `place`. A prompt that reaches it also reaches `place`."""
        return -(-place // self.coarse_step) * self.coarse_step


def offsets(marks: int) -> Iterator[int]:
    """Indices of the set bits of `marks`, descending."""
    while marks:
        offset = marks.bit_length() - 1
        yield offset
        marks ^= 1 << offset


MAX_BRANCHES: Final = 16
"""Maximum number of branches of one path; the deepest branches are kept."""


_GRAIN: Final = Grain()


class _Seen(msgspec.Struct, gc=False):
    """One prefix. Token counts start at the beginning of the prompt."""

    end_tokens: int
    """Last boundary of the prompt that added the prefix, or of a later prompt that continued beyond that boundary."""
    used_at: float
    """Total stored bytes at its last use."""
    is_divergence: bool = False
    """Requests diverged here."""
    divergences_after: int = 0
    """Distances, in boundaries after this one, at which requests diverged, as bits. Only boundaries of this cell."""
    is_guess: bool = False
    """It has a state that was stored by guess and not used yet."""
    is_awaited: bool = False
    """Requests diverged here, and no request has used the prefix since."""


class SeenPrefixes:
    """LRU table of at most `max_chunks` prefixes.

    The `keys` of a prompt are those of its boundaries, in order: the first key names the first `boundary_tokens`
    tokens, the last one ends at `Prompt.end_boundary` or after it. Equal prefixes have equal keys. `grain` bounds the
    cost of one prompt.

    Raises:
        ValueError: `max_chunks` is negative.
    """

    def __init__(self, max_chunks: int, grain: Grain = _GRAIN) -> None:
        if max_chunks < 0:
            raise ValueError(f"max_chunks must not be negative, got {max_chunks}")
        self._max_chunks = max_chunks
        self._grain = grain
        # Not a dict: finding the first key of a dict gets slow after many deletions at the front.
        self._seen: OrderedDict[Hashable, _Seen] = OrderedDict()
        self.num_forgotten = 0
        self._num_awaited = 1.0
        self._num_reached = 0.0

    def __len__(self) -> int:
        return len(self._seen)

    def add_facts(self, boundary_tokens: int, keys: Sequence[Hashable], prompt: Prompt, usage: StoreUsage) -> Prompt:
        """Returns the prompt with the facts of this table: branches, divergence, aged and missed tokens, `is_cut`,
        `known_share`.

        Aged: last used before the last `OLD_SHARE` of the store's capacity was stored. Missed: not held, and used since
        the last `MISSED_SHARE` of it was stored. O(boundaries), at most `Grain.max_places` of them.
        """
        end = prompt.end_boundary(boundary_tokens) // boundary_tokens
        resumed, held = (
            min(tokens // boundary_tokens, len(keys))
            for tokens in (prompt.resumed_tokens, prompt.held_tokens(boundary_tokens))
        )
        places = self._grain.places(len(keys))
        branches = tuple(place * boundary_tokens for place in self._divergences(keys, places, resumed, end))
        missed_since = usage.experience.bytes_ever - MISSED_SHARE * usage.capacity_bytes
        within = places[bisect.bisect_left(places, -max(held, end), key=neg) :]
        missed = next((place for place in within if self._is_used(keys, place, missed_since)), 0)
        known = self._seen.get(keys[held - 1]) or self._seen.get(keys[self._grain.cell(held) - 1]) if held else None
        is_divergence_unknown = missed > held or (
            held > resumed and (known is None or known.end_tokens <= held * boundary_tokens)
        )
        prompt = msgspec.structs.replace(
            prompt, missed_tokens=max(0, missed - held) * boundary_tokens, is_divergence_unknown=is_divergence_unknown
        )
        last = self._seen.get(keys[held - 1]) if held and self._diverges(keys, resumed, held, prompt) else None
        diverged = last.end_tokens - held * boundary_tokens if last else 0
        old_since = usage.experience.bytes_ever - OLD_SHARE * usage.capacity_bytes
        below = places[bisect.bisect_left(places, -resumed, key=neg) :]
        recent = next((place for place in (resumed, *below) if self._is_recent(keys, place, old_since)), 0)
        return msgspec.structs.replace(
            prompt,
            branches=branches,
            earlier_rest_tokens=max(0, diverged),
            aged_tokens=(resumed - recent) * boundary_tokens,
            reused_divergence_share=self._num_reached / self._num_awaited,
        )

    def note(
        self, boundary_tokens: int, keys: Sequence[Hashable], prompt: Prompt, placement: Placement, usage: StoreUsage
    ) -> None:
        """Records a request that was admitted with its stops, after `add_facts`. Call it once for each admission.

        O(boundaries): at most `Grain.max_places`, and the boundaries that `add_facts` and the stops name.
        """
        resumed, held = (
            min(tokens // boundary_tokens, len(keys))
            for tokens in (prompt.resumed_tokens, prompt.held_tokens(boundary_tokens))
        )
        diverges = self._diverges(keys, resumed, held, prompt)
        end_tokens, now = prompt.end_boundary(boundary_tokens), usage.experience.bytes_ever
        cell = self._grain.cell(held)
        named = {resumed, held, cell, *(tokens // boundary_tokens for tokens in prompt.branches)}
        named |= {stop.num_tokens // boundary_tokens for stop in placement.stops}
        for place in self._with_named(named, self._grain.places(len(keys))):  # the beginning last: it is evicted last
            seen = self._seen.pop(keys[place - 1], None)
            if seen is not None and seen.is_awaited and place >= resumed and not prompt.starts_over:
                seen.is_awaited = False
                self._num_reached += 1
            if seen is None:
                seen = _Seen(end_tokens, now)
            elif place > held:
                seen = _Seen(end_tokens, now, seen.is_divergence, seen.divergences_after)
            elif seen.end_tokens <= held * boundary_tokens:
                seen.end_tokens = end_tokens  # this prompt continues after the held part
            seen.used_at = now
            self._seen[keys[place - 1]] = seen
        if not prompt.starts_over:
            known = {
                0 if prompt.is_divergence_unknown else held,
                *(tokens // boundary_tokens for tokens in prompt.branches),
            }
            self._mark_awaited(keys, [place for place in known if resumed < place])
        if held and diverges:
            self._seen[keys[held - 1]].is_divergence = True
            self._seen[keys[cell - 1]].divergences_after |= 1 << (held - cell)
        if resumed and not prompt.starts_over:
            self._seen[keys[resumed - 1]].is_guess = False
        for stop in placement.stops:
            if stop.reason is StopReason.SPACED and stop.num_tokens <= len(keys) * boundary_tokens:
                self._seen[keys[stop.num_tokens // boundary_tokens - 1]].is_guess = True
        self._forget()

    def _mark_awaited(self, keys: Sequence[Hashable], places: Sequence[int]) -> None:
        """Marks boundaries without a state at which this request could have resumed, to count later requests there."""
        for place in places:
            self._num_awaited = self._num_awaited * KEPT_SHARE + 1
            self._num_reached *= KEPT_SHARE
            self._seen[keys[place - 1]].is_awaited = True

    def _diverges(self, keys: Sequence[Hashable], resumed: int, held: int, prompt: Prompt) -> bool:
        """True if this request is the first to diverge at the held boundary: the boundary has no state, or only one by
        guess that no request has used."""
        if prompt.starts_over or prompt.is_divergence_unknown:
            return False
        seen = self._seen.get(keys[resumed - 1]) if resumed else None
        return held > resumed or (seen is not None and seen.is_guess)

    def _divergences(self, keys: Sequence[Hashable], places: Sequence[int], resumed: int, end: int) -> list[int]:
        """Boundaries between `resumed` and `end` at which requests diverged, deepest first.

        Skipped boundaries are found through `divergences_after` of their cell.
        """
        found: list[int] = []
        is_whole = len(places) == len(keys)
        first_fine = 1 if is_whole else len(keys) - self._grain.fine_places + 1
        for place in places:
            if len(found) >= MAX_BRANCHES or place + self._grain.coarse_step <= resumed:
                break
            seen = self._seen.get(keys[place - 1])
            if seen is None:
                continue
            if place >= first_fine:
                if seen.is_divergence and resumed < place < end:
                    found.append(place)
            elif seen.divergences_after:
                diverged = (place + offset for offset in offsets(seen.divergences_after))
                within = (each for each in diverged if resumed < each < min(end, first_fine))
                # The bits of a cell may belong to other paths.
                found += (each for each in within if self._is_divergence(keys, each))
        return found[:MAX_BRANCHES]

    def _is_divergence(self, keys: Sequence[Hashable], place: int) -> bool:
        seen = self._seen.get(keys[place - 1])
        return seen is not None and seen.is_divergence

    def _with_named(self, named: set[int], places: Sequence[int]) -> Sequence[int]:
        """The places and the named boundaries, descending."""
        last = places[0] if places else 0
        if len(places) == last:
            return places
        return sorted({*places, *(place for place in named if 0 < place <= last)}, reverse=True)

    def _is_used(self, keys: Sequence[Hashable], place: int, since: float) -> bool:
        seen = self._seen.get(keys[place - 1])
        return seen is not None and seen.used_at >= since

    def _is_recent(self, keys: Sequence[Hashable], place: int, since: float) -> bool:
        """True if the prefix, or a recorded prefix that extends it, was used at `since` or later.

        Long prompts record only some prefixes, and the use of a prefix is also a use of all shorter prefixes.
        """
        for each in (place, min(self._grain.next_coarse(place), len(keys))):
            seen = self._seen.get(keys[each - 1]) if each else None
            if seen is not None and seen.used_at >= since:
                return True
        return False

    def _forget(self) -> None:
        while len(self._seen) > self._max_chunks:
            self._seen.popitem(last=False)
            self.num_forgotten += 1
