"""What a placement is made from, and the placement."""

from __future__ import annotations

import enum

import msgspec

from hybridkv.planner.checkpoints.experience import NO_EXPERIENCE, Experience


class StopReason(enum.StrEnum):
    """Why a prefill stops at a boundary, so that the state there can be stored."""

    JUNCTION = "junction"
    """The store holds every FULL group to there but no state: the request parts from what is stored."""
    BRANCH = "branch"
    """Earlier requests parted there."""
    SPACED = "spaced"
    """Before the prompt's end, where later requests are likely to part from it."""
    END = "end"
    """The last boundary of the prompt, where the engine does not stop of itself."""


class Stop(msgspec.Struct, frozen=True):
    """A boundary at which a prefill stops. `num_tokens` are counted from the prompt's start."""

    num_tokens: int
    reason: StopReason
    is_unproven: bool = False
    """It is worth the room that holds nothing, and no more."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt that is about to be computed. Positions are tokens from its start."""

    num_tokens: int
    resumed_tokens: int = 0
    """The prefix that is not computed: the engine holds it, or it is loaded."""
    junction_tokens: int = 0
    """The deepest boundary that all FULL groups of the store hold; not above `resumed_tokens` if there is none."""
    branches: tuple[int, ...] = ()
    """Where earlier requests parted on this path, as far as known."""
    parted_tokens: int = 0
    """How many tokens before an earlier prompt's end this one parts from it, as the first that parts there; 0: it does
    not, or nobody knows."""
    aged_tokens: int = 0
    """Of `resumed_tokens`, those that only a large part of the store could still hold: see `SeenPrefixes.look`."""
    missed_tokens: int = 0
    """How many tokens behind `held_tokens` were used lately, and are gone: see `SeenPrefixes.look`."""
    is_cut: bool = False
    """At `junction_tokens` nobody is known to have parted: the rest of an earlier path is gone, or it was an answer."""
    known_share: float = 0.0
    """Of places where requests were seen to part, the share that a later request has come back to."""
    starts_over: bool = False
    """It was admitted before, and begins again after a preemption or a failed load. What is stored and remembered of
    its path may be its own, so it is not taken to part from that."""
    keeps_end: bool = True
    """The engine stops at `end_boundary` of itself. False where boundaries are longer than the blocks at whose last the
    engine stops."""

    def end_boundary(self, boundary_tokens: int) -> int:
        """The last boundary before the last token, which is always computed. The state there is kept."""
        return max(0, self.num_tokens - 1) // boundary_tokens * boundary_tokens

    def held_tokens(self, boundary_tokens: int) -> int:
        """The deepest boundary of this prompt that is held, with a state there or without."""
        return max(self.resumed_tokens, min(self.junction_tokens, self.end_boundary(boundary_tokens)))


class Costs(msgspec.Struct, frozen=True):
    """What a state costs."""

    state_bytes: int
    """The states of one boundary: all RECURRENT groups, all ranks."""
    token_bytes: int
    """One token in all other stored groups, all ranks."""
    step_tokens: int
    """What one more step costs the engine, in tokens of prefill."""


class Market(msgspec.Struct, frozen=True):
    """What is known of the store."""

    capacity_bytes: int
    used_bytes: int = 0
    experience: Experience = NO_EXPERIENCE

    def has_room(self, costs: Costs) -> bool:
        """Whether one more state displaces nothing."""
        return self.used_bytes + costs.state_bytes <= self.capacity_bytes


class Limits(msgspec.Struct, frozen=True):
    """What the operator allows."""

    max_stops: int = 8
    """More steps for one request."""
    max_extra_share: float = 0.02
    """What stops may cost, as a share of the tokens that were computed lately, this prompt's with them."""


class LeftOut(msgspec.Struct, frozen=True):
    """Boundaries that were considered and are no stops, by cause."""

    stops: int = 0
    """Beyond `max_stops`."""
    share: int = 0
    """Beyond `max_extra_share`."""
    worth: int = 0
    """Not worth their step and their bytes in the store."""


class Placement(msgspec.Struct, frozen=True):
    """Where a prefill stops beside its end: ascending boundaries within the tokens that are computed."""

    stops: tuple[Stop, ...] = ()
    left_out: LeftOut = LeftOut()
    boundary_tokens: int = 0
    """What stops are multiples of; 0 for a placement that nobody planned."""
    extra_tokens: float = 0.0
    """What the stops cost, in tokens of prefill."""
