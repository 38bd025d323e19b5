"""Results of calls to a server, as values. A server sends no errors, so most failures are missing answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class CallFailureReason(enum.StrEnum):
    """Reason of a failed call."""

    BUSY = "busy"
    """Too many open calls. Nothing was sent."""
    TIMEOUT = "timeout"
    """No answer by the deadline. The server may still execute the call."""
    LOST = "lost"
    """The connection was dropped. The server may still execute the call."""
    UNSENT = "unsent"
    """No connection by the deadline. Nothing was or will be sent."""
    MALFORMED = "malformed"
    """The answer is invalid."""
    REFUSED = "refused"
    """The server answered, but did not execute the call."""
    CLOSED = "closed"
    """This side was closed."""


NOT_SENT = frozenset({CallFailureReason.BUSY, CallFailureReason.UNSENT})
"""Reasons after which the call was not sent."""
MAY_STILL_RUN = frozenset({CallFailureReason.TIMEOUT, CallFailureReason.LOST, CallFailureReason.CLOSED})
"""Reasons after which the server may still execute the call."""


class CallFailure(msgspec.Struct, frozen=True):
    """Failed call, as a value."""

    reason: CallFailureReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)


@dataclass(frozen=True, slots=True)
class CallAnswer(Generic[T_co]):
    """Answer of a server."""

    value: T_co


CallResult: TypeAlias = CallAnswer[T] | CallFailure
