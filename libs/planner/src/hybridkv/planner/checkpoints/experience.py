"""What requests have taught about the worth of states: bounded, and fading with every new sight.

Two things are learned. How often a later request parts from a stored prompt, by the distance to that prompt's end: the
instructions that end a template, a question behind a document or a retry have their own lengths, and these repeat. Long
prompts and short ones are mostly of different kinds, so it is counted by their length, too. And what a byte of the
store is worth, by what the older part of its content still saves.
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
"""What a request leaves of the weight of all before it: about 500 count."""
OLD_SHARE: Final = 0.25
"""What was last used when more than this share of the store has been stored since is old."""
MISSED_SHARE: Final = 2.0
"""What was last used when less than this share of the store had been stored since, and is gone, was missed."""
DOUBTED_PARTINGS: Final = 0.3
"""What is believed of every distance before the first prompt: less than one parting of one prompt."""
RUNGS: Final = (1, *(size for power in range(1, 10) for size in (1 << power, 3 << (power - 1))), 1024)
"""Distances to a prompt's end, in boundaries: two for each doubling. A parting counts for the next larger one, because
a state is of use to what parts behind it."""
LENGTHS: Final = 17
"""Lengths of prompts that are told apart, in boundaries: one for each doubling, the last for all that are longer."""
DOUBTED_PROMPTS: Final = 64.0
"""What is known of all prompts counts as much as so many of one length."""


class Partings(msgspec.Struct, frozen=True):
    """From prompts of one length."""

    partings: tuple[float, ...] = (0.0,) * len(RUNGS)
    """Of each rung, prompts from which a later one parted there, for the first time."""
    prompts: tuple[float, ...] = (0.0,) * len(RUNGS)
    """Of each rung, prompts that are longer than it."""


class Experience(msgspec.Struct, frozen=True):
    """Sums over requests, older ones counting less."""

    partings: tuple[float, ...] = (DOUBTED_PARTINGS,) * len(RUNGS)
    """As of `Partings`, of prompts of any length."""
    prompts: tuple[float, ...] = (1.0,) * len(RUNGS)
    by_length: tuple[Partings, ...] = (Partings(),) * LENGTHS
    aged_tokens: float = 0.0
    """Tokens that were resumed and that a store of `OLD_SHARE` of the size would not have held any more."""
    missed_tokens: float = 0.0
    """Tokens that were computed again, and that a store of `MISSED_SHARE` of the size would still have held."""
    resumed_tokens: float = 0.0
    """That were not computed."""
    stored_bytes: float = 0.0
    computed_tokens: float = 0.0
    extra_tokens: float = 0.0
    """What stops cost, in tokens of prefill."""
    bytes_ever: float = 0.0
    """Stored since the beginning: the clock by which ages are told. Does not fade."""

    def parting_rate(self, rung: int, num_boundaries: int) -> float:
        """How many later requests part first at a rung of a new prompt with so many boundaries; mostly below 1.

        Args:
            rung: its place in `RUNGS`.
            num_boundaries: of the prompt.
        """
        alike = self.by_length[_length(num_boundaries)]
        of_all = DOUBTED_PROMPTS * self.partings[rung] / self.prompts[rung]
        return (alike.partings[rung] + of_all) / (alike.prompts[rung] + DOUBTED_PROMPTS)

    @property
    def extra_share(self) -> float:
        """What stops cost, as a share of the tokens that were computed."""
        return self.extra_tokens / self.computed_tokens if self.computed_tokens > 0 else 0.0

    @property
    def tokens_per_byte(self) -> float:
        """What one more byte costs in tokens that are not saved, because it drives others out: 0 while there is room.

        A byte more in every `stored_bytes` shortens what the rest may stay by that share. `aged_tokens` is what the
        store saves more than `OLD_SHARE` of it would, so over its logarithm it is the change for such a share. Where
        everything goes before it is used again nothing is aged, and what was missed shows what bytes are worth.
        """
        if self.stored_bytes <= 0:
            return 0.0
        found = self.aged_tokens / math.log(1 / OLD_SHARE)
        with_missed = (self.aged_tokens + self.missed_tokens) / math.log(MISSED_SHARE / OLD_SHARE)
        return max(found, with_missed) / self.stored_bytes


NO_EXPERIENCE: Final = Experience()


def learn_request(experience: Experience, prompt: Prompt, placement: Placement) -> Experience:
    """The experience after a request was admitted with its stops; the same, if nobody planned any. Once for each time
    that it is admitted: one that starts over costs once more, and parts from nothing."""
    boundary_tokens = placement.boundary_tokens
    if boundary_tokens <= 0:
        return experience
    end, held = prompt.end_boundary(boundary_tokens), prompt.held_tokens(boundary_tokens)
    # What is held whole will not be parted from anew.
    if end > held and not prompt.starts_over:
        experience = _with_prompt(experience, end // boundary_tokens)
    if prompt.parted_tokens >= boundary_tokens and not prompt.starts_over:
        experience = _with_parting(experience, prompt.parted_tokens // boundary_tokens, held // boundary_tokens)
    return msgspec.structs.replace(
        experience,
        aged_tokens=experience.aged_tokens * KEPT_SHARE + prompt.aged_tokens,
        missed_tokens=experience.missed_tokens * KEPT_SHARE + prompt.missed_tokens,
        resumed_tokens=experience.resumed_tokens * KEPT_SHARE + prompt.resumed_tokens,
        stored_bytes=experience.stored_bytes * KEPT_SHARE,
        computed_tokens=experience.computed_tokens * KEPT_SHARE + max(0, prompt.num_tokens - prompt.resumed_tokens),
        extra_tokens=experience.extra_tokens * KEPT_SHARE + placement.extra_tokens,
    )


def _length(num_boundaries: int) -> int:
    return min(num_boundaries.bit_length(), LENGTHS - 1)


def _with_prompt(experience: Experience, num_boundaries: int) -> Experience:
    """One more prompt, of which nobody knows yet who will part from it."""
    rungs = bisect.bisect_left(RUNGS, num_boundaries)

    def fade(partings: tuple[float, ...], more: int) -> tuple[float, ...]:
        return (*(each * KEPT_SHARE + more for each in partings[:rungs]), *partings[rungs:])

    length = _length(num_boundaries)
    alike = experience.by_length[length]
    return msgspec.structs.replace(
        experience,
        partings=fade(experience.partings, 0),
        prompts=fade(experience.prompts, 1),
        by_length=_put(experience.by_length, length, Partings(fade(alike.partings, 0), fade(alike.prompts, 1))),
    )


def _with_parting(experience: Experience, distance: int, held: int) -> Experience:
    """A request parted from a prompt behind `held` boundaries, `distance` before its end. A prompt that is shorter than
    the rung had no boundary there, and a state would have served nobody."""
    rung, num_boundaries = bisect.bisect_left(RUNGS, distance), held + distance
    if rung == len(RUNGS) or RUNGS[rung] >= num_boundaries:
        return experience
    length = _length(num_boundaries)
    alike = experience.by_length[length]
    more = msgspec.structs.replace(alike, partings=_put(alike.partings, rung, alike.partings[rung] + 1))
    return msgspec.structs.replace(
        experience,
        partings=_put(experience.partings, rung, experience.partings[rung] + 1),
        by_length=_put(experience.by_length, length, more),
    )


def _put(row: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*row[:place], value, *row[place + 1 :])


def learn_stored(experience: Experience, num_bytes: int) -> Experience:
    """The experience after `num_bytes` were stored, of whatever group."""
    more = max(0, num_bytes)
    return msgspec.structs.replace(
        experience, stored_bytes=experience.stored_bytes + more, bytes_ever=experience.bytes_ever + more
    )
