"""Reasons why a connection ended. Each reason is counted, so that attacks and network failures can be distinguished."""

from __future__ import annotations

import enum


class CloseReason(enum.StrEnum):
    """Reason of an ended connection, for log lines and counter labels."""

    DONE = "done"
    """This side closed the connection."""
    ENDED = "ended"
    """The peer closed the connection."""
    RESET = "reset"
    """The network, the system or the peer ended the connection without a Bye, or the peer answers no heartbeat."""
    UNREACHABLE = "unreachable"
    """The connection could not be established."""
    NO_SECRET = "no_secret"
    """The address is on another host, and this side has no secret."""
    OVERSIZED = "oversized"
    """A frame, a list or a text exceeds its limit."""
    MALFORMED = "malformed"
    """The bytes are not a message, or a connection to a listener ended without a Hello and without another reason."""
    VERSION = "version"
    """The peer has another protocol version."""
    SECRET = "secret"
    """The peer does not have the secret."""
    HUNG_UP = "hung_up"
    """The peer ended the handshake without a reason: the peer exited, or has another secret or another version."""
    UNEXPECTED = "unexpected"
    """The peer sent a message that is not allowed in this state."""
    WRONG_PEER = "wrong_peer"
    """A peer with another name than expected answers at this address."""
    SELF = "self"
    """The address belongs to this process."""
    TOO_SLOW = "too_slow"
    """The handshake took longer than `handshake_timeout_s`."""
    TOO_MANY = "too_many"
    """There are too many connections, or too many handshakes at the same time."""
    BACKLOG = "backlog"
    """The peer does not read the messages that this side sends."""
    HANDLER = "handler"
    """A handler on this side raised an exception: a bug, or an invalid message that passed every check."""


class WireError(Exception):
    """An unacceptable message. A handler of a control connection may raise it: the connection then ends with `reason`.

    To callers outside `hybridkv.peers`, only `unpack_columns` and `MessageCodec` raise it.
    """

    def __init__(self, reason: CloseReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
