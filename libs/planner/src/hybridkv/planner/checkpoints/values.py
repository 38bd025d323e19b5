"""Inputs and result of `plan_stops`: where a prefill stops to store states."""

from __future__ import annotations

import enum

import msgspec

from hybridkv.planner.checkpoints.experience import NO_EXPERIENCE, Experience


class StopReason(enum.StrEnum):
    """Reason why a prefill stops at a boundary to store the state there."""

    JUNCTION = "junction"
    """The store holds every FULL group up to here but no state: the request diverges here from the stored prefix."""
    BRANCH = "branch"
    """Earlier requests diverged here."""
    SPACED = "spaced"
    """A guess: the savings from likely divergences exceed the cost. Not evenly spaced."""
    END = "end"
    """The last boundary of the prompt, if the engine does not stop there by default."""


class Stop(msgspec.Struct, frozen=True):
    """A boundary at which a prefill stops, `num_tokens` after the start of the prompt."""

    num_tokens: int
    reason: StopReason
    is_unproven: bool = False
    """The state may use free space of the store, but is not worth an eviction."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt before its prefill. Positions are in tokens from its start."""

    num_tokens: int
    resumed_tokens: int = 0
    """Length of the prefix that is not computed: the engine holds it, or it is loaded."""
    junction_tokens: int = 0
    """Last boundary up to which the store holds all FULL groups. At most `resumed_tokens` if there is no junction."""
    branches: tuple[int, ...] = ()
    """Known boundaries on this path at which earlier requests diverged."""
    earlier_rest_tokens: int = 0
    """Distance in tokens from the divergence to the end of the earlier prompt, if this prompt is the first to diverge
    there. 0 if there is no such divergence, or if it is unknown."""
    aged_tokens: int = 0
    """Number of `resumed_tokens` that a small store would have evicted: see `SeenPrefixes.add_facts`."""
    missed_tokens: int = 0
    """Number of tokens after `held_tokens` that were used recently, but are not held: see `SeenPrefixes.add_facts`."""
    is_divergence_unknown: bool = False
    """No divergence is known at `junction_tokens`: more of this prompt was used recently and is not held, or no known
    earlier prompt continues there, as after an answer."""
    reused_divergence_share: float = 0.0
    """Of all boundaries at which a request diverged: the share that a later request reached again."""
    starts_over: bool = False
    """The request was admitted before, and starts again after a preemption or a failed load. It may have stored the
    content of its path itself, so the end of this content does not count as a divergence."""
    engine_stops_at_end: bool = True
    """The engine stops at `end_boundary` by default. May be False if the distance between boundaries is larger than a
    block: the engine stops at the end of the last whole block, which need not be a boundary."""

    def end_boundary(self, boundary_tokens: int) -> int:
        """The last boundary before the last token, which is always computed. The engine keeps the state there if
        `engine_stops_at_end`; otherwise an END stop stores it."""
        return max(0, self.num_tokens - 1) // boundary_tokens * boundary_tokens

    def held_tokens(self, boundary_tokens: int) -> int:
        """The last boundary up to which the prompt is held, with or without a state there."""
        return max(self.resumed_tokens, min(self.junction_tokens, self.end_boundary(boundary_tokens)))


class Costs(msgspec.Struct, frozen=True):
    """Costs of a state."""

    state_bytes: int
    """Size of the states of one boundary: all RECURRENT groups, all ranks."""
    token_bytes: int
    """Size of one token in all other stored groups, all ranks."""
    step_tokens: int
    """Cost of one more step of the engine, in tokens of prefill."""


class StoreUsage(msgspec.Struct, frozen=True):
    """Capacity and use of the store."""

    capacity_bytes: int
    used_bytes: int = 0
    experience: Experience = NO_EXPERIENCE

    def has_room(self, costs: Costs) -> bool:
        """True if one more state fits without an eviction."""
        return self.used_bytes + costs.state_bytes <= self.capacity_bytes


class Limits(msgspec.Struct, frozen=True):
    """Limits that the operator sets."""

    max_stops: int = 8
    """Maximum number of additional steps for one request."""
    max_extra_share: float = 0.02
    """Maximum cost of all stops except END, as a share of the recently computed tokens, including this prompt. A new
    store allows more stops at known divergences: see `KNOWN_TOKENS`."""


class LeftOut(msgspec.Struct, frozen=True):
    """Numbers of boundaries that were considered but did not become stops, by reason."""

    stops: int = 0
    """Beyond `max_stops`."""
    share: int = 0
    """Beyond `max_extra_share`."""
    worth: int = 0
    """Expected savings below the cost of the step and of the bytes in the store."""


class Placement(msgspec.Struct, frozen=True):
    """Stops of a prefill before its end: ascending boundaries within the computed tokens."""

    stops: tuple[Stop, ...] = ()
    left_out: LeftOut = LeftOut()
    boundary_tokens: int = 0
    """Distance between boundaries: every stop is a multiple of it. 0 if `plan_stops` did not run."""
    extra_tokens: float = 0.0
    """Cost of all stops except END, in tokens of prefill."""
