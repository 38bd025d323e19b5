"""What is remembered of one request's states: where it stops for them, and which of them is the newest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hybridkv.planner import CacheSpec, GroupKind
from hybridkv.planner.checkpoints import Placement, Prompt


def state_groups(spec: CacheSpec) -> tuple[int, ...]:
    """The groups that have states."""
    return tuple(index for index in spec.stored_groups if spec.groups[index].kind is GroupKind.RECURRENT)


def state_step_tokens(spec: CacheSpec) -> int:
    """Where a state can be had and stored: at boundaries at which a block of every state ends. There is a state."""
    return math.lcm(spec.boundary_tokens, *(spec.groups[index].block_tokens for index in state_groups(spec)))


@dataclass(slots=True)
class Checkpointed:
    """Of one request, from a lookup to when the engine starts it over; whether it was admitted before, for longer."""

    asked: Prompt | None = None
    """What was known of it when it was planned."""
    prompt: Prompt | None = None
    """The same, and what is known of others like it."""
    placement: Placement = field(default_factory=Placement)
    newest_tokens: int = 0
    """Where its newest state is that was stored."""
    was_admitted: bool = False
    """What of its path is stored, and remembered, may be its own."""
    awaited_tokens: int = 0
    """The deepest state of its answer that could be stored."""

    def started_over(self) -> Checkpointed:
        """The engine starts it over."""
        return Checkpointed(was_admitted=self.was_admitted)

    def origin(self, num_tokens: int, num_prompt_tokens: int, boundary_tokens: int) -> str:
        """Where a state comes from that is stored of it: a label of `vllm:hybridkv_states_stored_total`."""
        if num_tokens > num_prompt_tokens:
            return "answer"
        if num_tokens >= (num_prompt_tokens - 1) // boundary_tokens * boundary_tokens:
            return "prompt_end"
        return "stop" if self.reason_at(num_tokens) else "engine"

    def reason_at(self, num_tokens: int) -> str:
        """Why it stops there, "" if it does not."""
        return next((str(stop.reason) for stop in self.placement.stops if stop.num_tokens == num_tokens), "")
