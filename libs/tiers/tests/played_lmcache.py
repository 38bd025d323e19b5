"""A server of LMCache that is a table in this process: what it holds, when it answers, and whether it is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from hybridkv.tiers import Key
from hybridkv.tiers.lmcache import Found, Lost, Unanswered


class PlayedServer:
    """A `Courier`. Nothing is answered before `answer`.

    Args:
        clock: seconds.
        held: bytes of each chunk.
    """

    def __init__(self, clock: Callable[[], float], held: Mapping[Key, int]) -> None:
        self.news: deque[Found | Unanswered | Lost] = deque()
        self.held = dict(held)
        self.waiting: list[tuple[int, Key]] = []
        self.is_there = True
        self.num_asked = 0
        self.is_closed = False
        self._clock = clock

    def look(self) -> None:
        pass

    def ask(self, request: int, keys: Sequence[Key], until_s: float) -> bool:
        if self.is_there:
            self.num_asked += len(keys)
            self.waiting += [(request, key) for key in keys]
        return self.is_there

    def answer(self) -> None:
        """Everything that was asked."""
        waiting, self.waiting = self.waiting, []
        self.news += [Found(request, key, self.held.get(key), self._clock()) for request, key in waiting]

    def give_up(self) -> None:
        """The same, by no answer."""
        waiting, self.waiting = self.waiting, []
        self.news += [Unanswered(request, key, self._clock()) for request, key in waiting]

    def lose(self) -> None:
        self.is_there = False
        self.news.append(Lost(self._clock()))

    def close(self) -> None:
        self.is_closed = True
