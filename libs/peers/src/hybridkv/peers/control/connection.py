"""One control connection of the loop: a socket, a session, and the times that bound it. For the loop's thread alone."""

from __future__ import annotations

import contextlib
import selectors
import socket

from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.wire import CloseReason, Session, WireError

RECEIVED_BYTES = 1 << 16
"""Taken from one connection before the next has its turn."""


class Connection:
    """`is_connecting` until the system says that the other side answered."""

    def __init__(self, link: LinkId, sock: socket.socket, session: Session, handlers: Handlers, now_s: float) -> None:
        self.link = link
        self.sock = sock
        self.session = session
        self.handlers = handlers
        self.is_server = False
        self.is_connecting = False
        self.host = ""
        """The address of the other side."""
        self.began_s = now_s
        self.heard_s = now_s
        self.spoke_s = now_s

    @property
    def is_established(self) -> bool:
        """Both sides have proven the secret."""
        return self.session.established is not None

    @property
    def events(self) -> int:
        """What the loop waits for."""
        if self.is_connecting:
            return selectors.EVENT_WRITE
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.session.output else 0)

    def receive(self) -> bytes:
        """What is there now; empty when there is nothing. `WireError` when the other side ended it."""
        try:
            data = self.sock.recv(RECEIVED_BYTES)
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as error:
            raise WireError(CloseReason.RESET, str(error)) from None
        if not data:
            reason = self.session.ended()
            raise WireError(reason, "the other side closed the connection")
        return data

    def flush(self) -> int:
        """Send what the system takes; how many bytes. `WireError` when the connection is no more."""
        output = self.session.output
        if not output:
            return 0
        try:
            num_bytes = self.sock.send(memoryview(output)[: 1 << 20])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise WireError(CloseReason.RESET, str(error)) from None
        del output[:num_bytes]
        return num_bytes

    def connected(self) -> None:
        """The system says that connecting is over. `WireError` UNREACHABLE when nobody answered."""
        if number := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise WireError(CloseReason.UNREACHABLE, f"errno {number}")
        self.is_connecting = False

    def close(self, reason: CloseReason) -> None:
        with contextlib.suppress(OSError):
            if words := self.session.last_words(reason):
                # Behind what waits already: an answer that is cut would be no frame.
                self.sock.send(bytes(self.session.output) + words)
        with contextlib.suppress(OSError):
            self.sock.close()
