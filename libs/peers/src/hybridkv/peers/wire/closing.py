"""Why a connection ended. Each reason is counted, so what strangers try can be told from what networks do."""

from __future__ import annotations

import enum


class CloseReason(enum.StrEnum):
    """One word for a log line and for the label of a counter."""

    DONE = "done"
    """This side ended it."""
    ENDED = "ended"
    """The other side ended it."""
    RESET = "reset"
    """The network, the system or the other side ended it, without a word; or the other side answers no heartbeat."""
    UNREACHABLE = "unreachable"
    """It never came to be."""
    NO_SECRET = "no_secret"
    """The address is another host's, and this side has no secret."""
    OVERSIZED = "oversized"
    """A frame, a list or a text is longer than it may be."""
    MALFORMED = "malformed"
    """Bytes that are no message."""
    VERSION = "version"
    """The other side speaks another version."""
    SECRET = "secret"
    """The other side does not know the secret, or proved something else."""
    HUNG_UP = "hung_up"
    """The other side ended the handshake and did not say why: it is gone, or has another secret or another version."""
    UNEXPECTED = "unexpected"
    """A message that does not belong here."""
    WRONG_PEER = "wrong_peer"
    """Somebody else answers at this address."""
    SELF = "self"
    """This engine answers itself."""
    TOO_SLOW = "too_slow"
    """The handshake took too long."""
    TOO_MANY = "too_many"
    """More connections, or more handshakes at a time, than are allowed."""
    BACKLOG = "backlog"
    """The other side does not take what is sent to it."""
    HANDLER = "handler"
    """This side failed over a message: a bug here, or a message that got through every check."""


class WireError(Exception):
    """What was received cannot be accepted: its connection ends, for `reason`. Never leaves `hybridkv.peers`."""

    def __init__(self, reason: CloseReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
