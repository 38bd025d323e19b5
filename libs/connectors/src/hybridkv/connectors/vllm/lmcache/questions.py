"""What a server has of a prefix: asked without waiting, and locked until nobody needs the answer any more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridkv.lmcache.calls import Answer, Ended, Lack, Trouble
from hybridkv.lmcache.operations import Found, Operations, Prefix

logger = logging.getLogger("vllm.hybridkv.lmcache")


@dataclass(slots=True)
class Question:
    """One prefix.

    Args:
        digests: what names its chunks.
        until_s: nobody waits for the answer after that.
        ended: how it ended, once it has.
    """

    digests: tuple[bytes, ...]
    until_s: float
    ended: Ended[Found] | None = None
    is_dropped: bool = False


class Questions:
    """For the engine's thread; answers come on another.

    Args:
        operations: of a process that only looks.
        prefix_of: what the server is asked for.
        timeout_s: of an answer.
        clock: seconds.
    """

    def __init__(
        self,
        operations: Operations,
        prefix_of: Callable[[Sequence[bytes]], Prefix],
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._operations = operations
        self._prefix_of = prefix_of
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()

    def ask(self, digests: Sequence[bytes]) -> Question:
        """Find how many of these chunks every group can be resumed behind."""
        question = Question(tuple(digests), self._clock() + self._timeout_s)

        def hear(ended: Ended[Found]) -> None:
            with self._lock:
                question.ended = ended
                is_dropped = question.is_dropped
            if is_dropped:
                self._release(ended)

        try:
            self._operations.lookup(self._prefix_of(digests), None, self._timeout_s, hear)
        except Exception as error:  # a bug costs this question, and not the engine
            logger.exception("LMCache's server could not be asked")
            hear(Lack(Trouble.UNSENT, f"{type(error).__name__}: {error}"))
        return question

    def drop(self, question: Question) -> None:
        """Nobody needs what it locked, or will lock. Repeatable."""
        with self._lock:
            if question.is_dropped:
                return
            question.is_dropped = True
            ended = question.ended
        if ended is not None:
            self._release(ended)

    def _release(self, ended: Ended[Found]) -> None:
        if isinstance(ended, Answer) and ended.value.num_chunks:
            self._operations.release(ended.value)
