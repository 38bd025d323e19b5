"""How a question to a server ends: values. A server has no word for an error, so most of these are about silence."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Trouble(enum.StrEnum):
    """Why there is no answer, or none that helps."""

    BUSY = "busy"
    """As much is under way as may be: nothing was sent."""
    TIMEOUT = "timeout"
    """No answer by the deadline. What was asked may still happen."""
    LOST = "lost"
    """The connection was given up meanwhile. What was asked may still happen."""
    UNSENT = "unsent"
    """There was no connection by the deadline: nothing was sent, and nothing will be."""
    MALFORMED = "malformed"
    """An answer that is none."""
    REFUSED = "refused"
    """The server said that it did not do it."""
    CLOSED = "closed"
    """This side was closed."""


NEVER_LEFT = frozenset({Trouble.BUSY, Trouble.UNSENT})
"""Of these the server never hears."""
MAY_HAPPEN = frozenset({Trouble.TIMEOUT, Trouble.LOST, Trouble.CLOSED})
"""What was asked may be done yet, or be under way."""


class Lack(msgspec.Struct, frozen=True):
    """No answer, as a value."""

    trouble: Trouble
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.trouble}: {self.detail}" if self.detail else str(self.trouble)


@dataclass(frozen=True, slots=True)
class Answer(Generic[T_co]):
    """What a server said."""

    value: T_co


Ended: TypeAlias = Answer[T] | Lack


class ChannelCounts(msgspec.Struct, frozen=True):
    """Since the start of a channel. Merging is addition."""

    calls: int = 0
    answers: int = 0
    late_answers: int = 0
    """After their deadline."""
    strange_frames: int = 0
    """That answer nothing that was asked."""
    drops: int = 0
    """Connections that were given up."""
    lacks: dict[Trouble, int] = {}
    """By reason. Only those that occurred."""
