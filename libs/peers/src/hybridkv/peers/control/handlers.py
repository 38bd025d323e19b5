"""Callbacks of a control loop. Callbacks run on the loop's thread, must not block, and may call `send`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

from hybridkv.peers.wire import CloseReason, Message

LinkId = NewType("LinkId", int)
"""Id of one connection. Never reused within the process."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """Callbacks of one listener or outgoing connection. An exception ends only the connection: with the reason of a
    `WireError`, else with HANDLER. Exceptions of `closed` are only logged."""

    opened: Callable[[LinkId, str], None]
    """Called when both sides have proven the secret. The string is the peer's name."""
    received: Callable[[LinkId, Message], None]
    """Called with each message, in the order of sending."""
    closed: Callable[[LinkId, CloseReason], None]
    """Last call for a link that `connect` returned or that was opened. Strangers are only counted."""


@dataclass(frozen=True, slots=True)
class ControlCounts:
    """Connections since the start of a loop: opened, and ended or failed by reason."""

    opened: int
    closed: dict[CloseReason, int]
