"""Reasons why a connection ended. Each is counted, which separates attacks from network failures."""

from __future__ import annotations

import enum


class CloseReason(enum.StrEnum):
    """Reason of an ended connection, for log lines and counter labels."""

    DONE = "done"
    """This side closed it."""
    ENDED = "ended"
    """The peer closed it."""
    RESET = "reset"
    """The network, the system or the peer ended it without a Bye, or the peer answers no heartbeat."""
    UNREACHABLE = "unreachable"
    """It could not be established."""
    NO_SECRET = "no_secret"
    """The address is on another host, and this side has no secret."""
    OVERSIZED = "oversized"
    """A frame, a list or a text exceeds its limit."""
    MALFORMED = "malformed"
    """The bytes are not a message."""
    VERSION = "version"
    """The peer has another protocol version."""
    SECRET = "secret"
    """The peer does not have the secret."""
    HUNG_UP = "hung_up"
    """The peer ended the handshake without a reason: it exited, or has another secret or another version."""
    UNEXPECTED = "unexpected"
    """A message that is not allowed in this state."""
    WRONG_PEER = "wrong_peer"
    """Another peer than the expected one answers at this address."""
    SELF = "self"
    """The address is that of this process."""
    TOO_SLOW = "too_slow"
    """The handshake took longer than `handshake_timeout_s`."""
    TOO_MANY = "too_many"
    """Too many connections, or too many handshakes at a time."""
    BACKLOG = "backlog"
    """The peer does not read the messages sent to it."""
    HANDLER = "handler"
    """A handler on this side raised an exception: a bug, or an invalid message that passed every check."""


class WireError(Exception):
    """An unacceptable message; its connection ends with `reason`. Never raised to callers outside `hybridkv.peers`."""

    def __init__(self, reason: CloseReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
