"""What the owner of a control loop is told. Called on the loop's thread: it may not wait, and may call `send`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

from hybridkv.peers.wire import CloseReason, Message

LinkId = NewType("LinkId", int)
"""One connection, for as long as the process lives: numbers are not used again."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """An exception in one of them ends that connection, for HANDLER, and nothing else."""

    opened: Callable[[LinkId, str], None]
    """Both sides have proven the secret; the name is the peer's."""
    received: Callable[[LinkId, Message], None]
    """One message, in the order of sending."""
    closed: Callable[[LinkId, CloseReason], None]
    """The last call for a link of `connect`, and for one that was opened; a stranger at the port is only counted."""


@dataclass(frozen=True, slots=True)
class ControlCounts:
    """Connections since the start of a loop: those that were opened, and by reason those that ended or failed."""

    opened: int
    closed: dict[CloseReason, int]
