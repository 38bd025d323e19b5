"""Statistics of requests that estimate the value of states. Bounded; older requests count less.

Two things are estimated. First, how often a later request diverges from a stored prompt, by distance to the end of that
prompt: the instructions at the end of a template, a question after a document, and a retry have typical lengths. Long
and short prompts differ in kind, so the rates are also kept by length. Second, the value of a byte of the store: the
tokens that the older part of its content still saves.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from hybridkv.planner.checkpoints.values import Placement, Prompt

T = TypeVar("T")

KEPT_SHARE: Final = 0.998
"""Factor on the weight of all earlier requests, for each new one: about 500 requests count."""
OLD_SHARE: Final = 0.25
"""Content is old if more than this share of the store's capacity was stored since its last use."""
MISSED_SHARE: Final = 2.0
"""Evicted content was missed if less than this share of the store's capacity was stored since its last use."""
PRIOR_DIVERGENCES: Final = 0.3
"""Prior for every distance, in divergences of one prompt."""
DISTANCES: Final = (1, *(size for power in range(1, 10) for size in (1 << power, 3 << (power - 1))), 1024)
"""Distances to the end of a prompt, in boundaries: two for each doubling. A divergence counts for its own distance, or
for the next larger one in this list, because a state serves requests that diverge after it."""
LENGTHS: Final = 17
"""Number of length classes of prompts, in boundaries: one for each doubling; the last one is open."""
PRIOR_PROMPTS: Final = 64.0
"""Weight of the rates of all prompts, as a number of prompts of one length."""


class Divergences(msgspec.Struct, frozen=True):
    """Counts of prompts of one length class (`LENGTHS`). Older prompts count less."""

    divergences: tuple[float, ...] = (0.0,) * len(DISTANCES)
    """For each index of `DISTANCES`, number of prompts from which a later prompt was the first to diverge there."""
    prompts: tuple[float, ...] = (0.0,) * len(DISTANCES)
    """For each index of `DISTANCES`, number of prompts that are longer than this distance."""


class Experience(msgspec.Struct, frozen=True):
    """Sums over requests. Older requests count less."""

    divergences: tuple[float, ...] = (PRIOR_DIVERGENCES,) * len(DISTANCES)
    """As `Divergences.divergences`, over prompts of all lengths."""
    prompts: tuple[float, ...] = (1.0,) * len(DISTANCES)
    by_length: tuple[Divergences, ...] = (Divergences(),) * LENGTHS
    aged_tokens: float = 0.0
    """Resumed tokens that a store of `OLD_SHARE` of the capacity would have evicted before."""
    missed_tokens: float = 0.0
    """Recomputed tokens that a store of `MISSED_SHARE` of the capacity would still hold."""
    resumed_tokens: float = 0.0
    """Tokens of resumed prefixes."""
    stored_bytes: float = 0.0
    computed_tokens: float = 0.0
    extra_tokens: float = 0.0
    """Cost of all stops except END, in tokens of prefill."""
    bytes_ever: float = 0.0
    """Total stored bytes: the clock for ages. Does not fade."""

    def divergence_rate(self, index: int, num_boundaries: int) -> float:
        """Expected number of later requests that are the first to diverge at a distance from the end of a new prompt;
        mostly below 1.

        Args:
            index: index in `DISTANCES`.
            num_boundaries: boundaries of the prompt.
        """
        alike = self.by_length[_length_class(num_boundaries)]
        of_all = PRIOR_PROMPTS * self.divergences[index] / self.prompts[index]
        return (alike.divergences[index] + of_all) / (alike.prompts[index] + PRIOR_PROMPTS)

    @property
    def extra_share(self) -> float:
        """Cost of stops, as a share of the computed tokens."""
        return self.extra_tokens / self.computed_tokens if self.computed_tokens > 0 else 0.0

    @property
    def tokens_per_byte(self) -> float:
        """Tokens that one more stored byte costs, because it evicts other content. 0 while there is room.

        One more byte per `stored_bytes` shortens the lifetime of all other content by that share. `aged_tokens` are the
        savings beyond those of a store of `OLD_SHARE` of the capacity; divided by the logarithm of that ratio, they are
        the change per share. If all content is evicted before its reuse, no tokens are aged, and the missed tokens show
        the value of a byte.
        """
        if self.stored_bytes < 1:
            return 0.0  # `stored_bytes` has faded: a division would overflow
        found = self.aged_tokens / math.log(1 / OLD_SHARE)
        with_missed = (self.aged_tokens + self.missed_tokens) / math.log(MISSED_SHARE / OLD_SHARE)
        return max(found, with_missed) / self.stored_bytes


NO_EXPERIENCE: Final = Experience()


def learn_request(experience: Experience, prompt: Prompt, placement: Placement) -> Experience:
    """Experience after a request was admitted with its stops. Unchanged if `placement.boundary_tokens` is 0.

    Call this function once for each admission. If a request starts over, its costs count again, its divergence does
    not.
    """
    boundary_tokens = placement.boundary_tokens
    if boundary_tokens <= 0:
        return experience
    end, held = prompt.end_boundary(boundary_tokens), prompt.held_tokens(boundary_tokens)
    # No later request is the first to diverge from a prompt that is held whole.
    if end > held and not prompt.starts_over:
        experience = _with_prompt(experience, end // boundary_tokens)
    if prompt.earlier_rest_tokens >= boundary_tokens and not prompt.starts_over:
        experience = _with_divergence(
            experience, prompt.earlier_rest_tokens // boundary_tokens, held // boundary_tokens
        )
    return msgspec.structs.replace(
        experience,
        aged_tokens=experience.aged_tokens * KEPT_SHARE + prompt.aged_tokens,
        missed_tokens=experience.missed_tokens * KEPT_SHARE + prompt.missed_tokens,
        resumed_tokens=experience.resumed_tokens * KEPT_SHARE + prompt.resumed_tokens,
        stored_bytes=experience.stored_bytes * KEPT_SHARE,
        computed_tokens=experience.computed_tokens * KEPT_SHARE + max(0, prompt.num_tokens - prompt.resumed_tokens),
        extra_tokens=experience.extra_tokens * KEPT_SHARE + placement.extra_tokens,
    )


def _length_class(num_boundaries: int) -> int:
    return min(num_boundaries.bit_length(), LENGTHS - 1)


def _with_prompt(experience: Experience, num_boundaries: int) -> Experience:
    """Adds a prompt without a divergence yet."""
    count = bisect.bisect_left(DISTANCES, num_boundaries)

    def fade(divergences: tuple[float, ...], more: int) -> tuple[float, ...]:
        return (*(each * KEPT_SHARE + more for each in divergences[:count]), *divergences[count:])

    length = _length_class(num_boundaries)
    alike = experience.by_length[length]
    return msgspec.structs.replace(
        experience,
        divergences=fade(experience.divergences, 0),
        prompts=fade(experience.prompts, 1),
        by_length=_put(experience.by_length, length, Divergences(fade(alike.divergences, 0), fade(alike.prompts, 1))),
    )


def _with_divergence(experience: Experience, distance: int, held: int) -> Experience:
    """Adds a request that diverged from a prompt after `held` boundaries, `distance` before its end.

    Ignored if the prompt is shorter than the distance: it had no boundary there for a state.
    """
    index, num_boundaries = bisect.bisect_left(DISTANCES, distance), held + distance
    if index == len(DISTANCES) or DISTANCES[index] >= num_boundaries:
        return experience
    length = _length_class(num_boundaries)
    alike = experience.by_length[length]
    more = msgspec.structs.replace(alike, divergences=_put(alike.divergences, index, alike.divergences[index] + 1))
    return msgspec.structs.replace(
        experience,
        divergences=_put(experience.divergences, index, experience.divergences[index] + 1),
        by_length=_put(experience.by_length, length, more),
    )


def _put(row: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*row[:place], value, *row[place + 1 :])


def learn_stored(experience: Experience, num_bytes: int) -> Experience:
    """Experience after `num_bytes` were stored, of any group."""
    more = max(0, num_bytes)
    return msgspec.structs.replace(
        experience, stored_bytes=experience.stored_bytes + more, bytes_ever=experience.bytes_ever + more
    )
