"""Whether states that a path has outgrown are of use to anybody, learned from who comes back to them.

The next turn of a conversation goes on from the last turn's state and leaves one of its own, where the turn after that
will resume. What it went on from serves only those that go another way from the same place: a turn that is tried again,
a second question about one document. How many come differs a lot: in chats one in a hundred such states is met again,
behind documents every other one. So it is counted, and weighed against what the bytes would hold otherwise.
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


class OutgrownStates:
    """A table of at most `max_states` outgrown states, of which the oldest are forgotten: nobody is counted who comes
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
        self._num_outgrown = 1.0
        self._num_met = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def met_share(self) -> float:
        """Of the states that were outgrown lately, the share that a request has come back to; mostly below 1, and 0
        before the first of them. About 500 states count."""
        return self._num_met / self._num_outgrown

    def note(self, key: Hashable) -> None:
        """A request that went on from this state has left one of its own. The second that does so came back to it."""
        if key in self._waiting:
            self.meet((key,))
            return
        self._num_outgrown = self._num_outgrown * KEPT_SHARE + 1
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

    def gives_way(self, num_tokens: int, market: Market, costs: Costs) -> bool:
        """Whether an outgrown state at `num_tokens` may leave the store first: it saves no more than its bytes cost.

        It saves `num_tokens` at most, to each who comes back. So before anybody has, every state gives way.
        """
        return self.met_share * num_tokens <= costs.state_bytes * market.experience.tokens_per_byte

    def is_unproven(self, num_tokens: int, market: Market, costs: Costs) -> bool:
        """Whether a state that saves `num_tokens` may take no room but what holds nothing.

        As `gives_way`, and in a young store the bytes are dearer.
        """
        experience = market.experience
        if self.gives_way(num_tokens, market, costs):
            return True
        if experience.bytes_ever >= YOUNG * market.capacity_bytes:
            return False
        displaced = DEARER * costs.state_bytes * experience.resumed_tokens
        return self.met_share * num_tokens * experience.stored_bytes <= displaced

    def forget(self) -> None:
        """Nothing that was stored is there any more. What was learned stays."""
        self._waiting.clear()
