"""Estimates whether states at the end of answers are worth their bytes, from the share of them that later requests use.

The next turn of a conversation resumes after the last answer if its history contains the answer unchanged. The share
varies a lot: it is zero for models that drop their reasoning. So it is measured, and compared with the value of the
bytes for other content.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Final

from hybridkv.planner.checkpoints.experience import KEPT_SHARE
from hybridkv.planner.checkpoints.values import Costs, StoreUsage

YOUNG_CAPACITIES: Final = 4
"""A store is young until this multiple of its capacity was stored. Before that, evicted content is rarely missed."""
YOUNG_BYTE_FACTOR: Final = 4
"""Assumed value of a byte of a young store, as a multiple of the average savings per byte."""


class AnswerReuse:
    """Table of at most `max_states` states of answers. The oldest states are forgotten: their later use is not counted.

    A key is opaque and identifies a boundary and the prefix before it.

    Raises:
        ValueError: `max_states` is negative.
    """

    def __init__(self, max_states: int) -> None:
        if max_states < 0:
            raise ValueError(f"max_states must not be negative, got {max_states}")
        self._max_states = max_states
        self._waiting: OrderedDict[Hashable, None] = OrderedDict()
        self._num_noted = 1.0
        self._num_resumed = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def resumed_share(self) -> float:
        """Share of the last states (about 500) that later requests resumed or could have resumed; mostly below 1, and 0
        at the start."""
        return self._num_resumed / self._num_noted

    def note(self, key: Hashable) -> None:
        """Records an answer with a state at its end, stored or not. A known key counts as a later use of its state."""
        if key in self._waiting:
            self.record_resumed((key,))
            return
        self._num_noted = self._num_noted * KEPT_SHARE + 1
        self._num_resumed *= KEPT_SHARE
        self._waiting[key] = None
        self._waiting.move_to_end(key)
        if len(self._waiting) > self._max_states:
            self._waiting.popitem(last=False)

    def record_resumed(self, keys: Iterable[Hashable]) -> None:
        """Records a request that resumes at one of these boundaries, or diverges there from the stored prefix.

        The stored attention blocks show the boundary even if the state was evicted. Each state counts once.
        """
        for key in keys:
            if key in self._waiting:
                del self._waiting[key]
                self._num_resumed += 1

    def is_unproven(self, num_tokens: int, usage: StoreUsage, costs: Costs) -> bool:
        """True if a state that saves `num_tokens` for each later request saves no more than its bytes cost.

        Such a state may take free space only. In a young store bytes cost more. Until a first state is used again,
        every state is unproven.
        """
        experience = usage.experience
        if self.resumed_share * num_tokens <= costs.state_bytes * experience.tokens_per_byte:
            return True
        if experience.bytes_ever >= YOUNG_CAPACITIES * usage.capacity_bytes:
            return False
        displaced = YOUNG_BYTE_FACTOR * costs.state_bytes * experience.resumed_tokens
        return self.resumed_share * num_tokens * experience.stored_bytes <= displaced

    def forget(self) -> None:
        """Forgets all states after the store was cleared. Keeps the statistics."""
        self._waiting.clear()
