"""`TierMedium` that fails, corrupts, delays and loses as planned, and otherwise delegates to another.

It accesses bytes only through `ExposesBytes`, and only when the plan corrupts. Starts no thread and reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridkv.tiers.contract import BatchedMedium, Completion, ExposesBytes, Failure, Key, Slot, Ticket, TierMedium
from hybridkv.tiers.errors import TierConfigurationError
from kits.tiers.faults.plan import Action, Corrupt, Delay, Drop, Fail, FaultPlan, Operation, Trigger

if TYPE_CHECKING:
    from typing_extensions import Buffer


class FaultInjectingMedium:
    """Wraps `inner`. `TierConfigurationError` when the plan corrupts and `inner` does not expose its bytes."""

    def __init__(self, inner: TierMedium, plan: FaultPlan) -> None:
        corrupts = any(isinstance(rule.action, Corrupt) for rule in plan.rules)
        if corrupts and not isinstance(inner, ExposesBytes):
            raise TierConfigurationError("plan", "no Corrupt for a medium without views()", type(inner).__name__)
        self._inner = inner
        self._trigger = Trigger(plan)
        self._planned: dict[Ticket, tuple[Action, Slot]] = {}
        self._ready: list[Completion] = []
        self._delayed: list[tuple[int, Completion]] = []
        self._num_dropped = 0

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        if not self._intercept(Operation.STORE, ticket, key, slot):
            self._inner.store(ticket, key, slot, source)

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        if not self._intercept(Operation.LOAD, ticket, key, slot):
            self._inner.load(ticket, key, slot, destination)

    def flush(self) -> None:
        """As the inner medium, if it is batched."""
        if isinstance(self._inner, BatchedMedium):
            self._inner.flush()

    def poll(self) -> list[Completion]:
        self._collect()
        waiting = [(num_polls - 1, completion) for num_polls, completion in self._delayed]
        completions = self._ready
        self._ready = [completion for num_polls, completion in waiting if num_polls <= 0]
        self._delayed = [(num_polls, completion) for num_polls, completion in waiting if num_polls > 0]
        return completions

    def drain(self, timeout_s: float) -> bool:
        """Does not wait for delays, which only polls end: False while a completion is held back or after one was
        dropped."""
        is_drained = self._inner.drain(timeout_s)
        self._collect()
        return is_drained and not self._delayed and not self._num_dropped

    def close(self) -> None:
        self._inner.close()

    def views(self, slot: Slot) -> list[memoryview]:
        """As the inner medium; `TierConfigurationError` if it has none."""
        if not isinstance(self._inner, ExposesBytes):
            raise TierConfigurationError("medium", "a medium with views()", type(self._inner).__name__)
        return self._inner.views(slot)

    def _intercept(self, operation: Operation, ticket: Ticket, key: Key, slot: Slot) -> bool:
        """Whether the plan answers this call itself."""
        action = self._trigger.action(operation, key)
        if isinstance(action, Fail):
            self._ready.append(Completion(ticket, Failure(action.reason, "injected")))
            return True
        if action is not None:
            self._planned[ticket] = (action, slot)
        return False

    def _collect(self) -> None:
        """Takes the completions of the inner medium."""
        for completion in self._inner.poll():
            action, slot = self._planned.pop(completion.ticket, (None, None))
            if isinstance(action, Drop):
                self._num_dropped += 1
            elif isinstance(action, Delay):
                self._delayed.append((action.num_polls, completion))
            else:
                if isinstance(action, Corrupt) and slot is not None and completion.failure is None:
                    self._flip(slot, action.byte_index)
                self._ready.append(completion)

    def _flip(self, slot: Slot, byte_index: int) -> None:
        position = byte_index % slot.num_bytes
        for view in self.views(slot):
            if position < len(view):
                view[position] ^= 0xFF
                return
            position -= len(view)
