"""Whether states of answers are of use to anybody, learned from who comes back to them.

The next turn of a conversation goes on from the last answer, where its history holds the answer as it was. How many do
differs a lot: with models that drop their reasoning none does. So it is counted, and weighed against what the bytes
would hold otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Final

from hybridkv.planner.checkpoints.experience import KEPT_SHARE
from hybridkv.planner.checkpoints.values import Costs, Market

YOUNG: Final = 4
"""A store that was stored anew less often than this is young: what it gave up can hardly have been missed."""
DEARER: Final = 4
"""A byte of a young store is taken to be worth so many times what all of them save on average."""


class AwaitedStates:
    """A table of at most `max_states` states of answers, of which the oldest are forgotten: nobody is counted who comes
    back to these.

    A key is opaque, and stands for a boundary and the prefix before it.

    Raises:
        ValueError: `max_states` is negative.
    """

    def __init__(self, max_states: int) -> None:
        if max_states < 0:
            raise ValueError(f"max_states must not be negative, got {max_states}")
        self._max_states = max_states
        self._waiting: OrderedDict[Hashable, None] = OrderedDict()
        self._num_noted = 1.0
        self._num_met = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def met_share(self) -> float:
        """Of the states that were noted lately, the share that a request has come back to; mostly below 1, and 0
        before the first of them. About 500 states count."""
        return self._num_met / self._num_noted

    def note(self, key: Hashable) -> None:
        """An answer passed here, stored or not. The second that does so came back to it."""
        if key in self._waiting:
            self.meet((key,))
            return
        self._num_noted = self._num_noted * KEPT_SHARE + 1
        self._num_met *= KEPT_SHARE
        self._waiting[key] = None
        self._waiting.move_to_end(key)
        if len(self._waiting) > self._max_states:
            self._waiting.popitem(last=False)

    def meet(self, keys: Iterable[Hashable]) -> None:
        """A request resumes at one of these boundaries, or parts there from what is stored: the attention shows it,
        also where the state is gone. Each state counts once."""
        for key in keys:
            if key in self._waiting:
                del self._waiting[key]
                self._num_met += 1

    def is_unproven(self, num_tokens: int, market: Market, costs: Costs) -> bool:
        """Whether a state that saves `num_tokens`, to each who comes back, saves no more than its bytes cost.

        It may then take no room but what holds nothing. In a young store the bytes are dearer. Before anybody has come
        back every state is unproven.
        """
        experience = market.experience
        if self.met_share * num_tokens <= costs.state_bytes * experience.tokens_per_byte:
            return True
        if experience.bytes_ever >= YOUNG * market.capacity_bytes:
            return False
        displaced = DEARER * costs.state_bytes * experience.resumed_tokens
        return self.met_share * num_tokens * experience.stored_bytes <= displaced

    def forget(self) -> None:
        """Nothing that was stored is there any more. What was learned stays."""
        self._waiting.clear()
