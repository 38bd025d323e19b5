"""Answers reads of this process's memory: one thread, which waits for no peer.

A connection has one request at a time in hand; the next stays in the socket until the answer is out, so a peer that
asks much and takes little holds nothing here. Bytes go from registered memory into the socket without a copy between.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from hybridkv.peers.commands import Commands
from hybridkv.peers.transport.memory import Pieces, RegisteredMemory
from hybridkv.peers.transport.tcp.options import TcpOptions
from hybridkv.peers.transport.tcp.protocol import Answer, decode_read, encode
from hybridkv.peers.wire import (
    Channel,
    CloseReason,
    Identity,
    ServerHandshake,
    Session,
    WireError,
    unpack_columns,
    who_gives_way,
)

logger = logging.getLogger(__name__)

VIEWS_AT_A_TIME = 256
"""Pieces that one call of the system sends."""
SENT_AT_A_TIME = 8 << 20
"""Bytes of one connection before the next has its turn."""


class _Reader:
    """One connection: somebody who reads this process's memory."""

    def __init__(self, sock: socket.socket, host: str, session: Session, now_s: float) -> None:
        self.sock = sock
        self.host = host
        self.session = session
        self.began_s = now_s
        self.moved_s = now_s
        self.pieces: Pieces | None = None
        self.memory = RegisteredMemory()
        self.next_piece = 0
        self.views: deque[memoryview] = deque()

    @property
    def is_answering(self) -> bool:
        return self.pieces is not None or bool(self.session.output)

    @property
    def events(self) -> int:
        return selectors.EVENT_WRITE if self.is_answering else selectors.EVENT_READ

    def send_some(self) -> int:
        """What the system takes now. `WireError` when the connection is no more."""
        if self.pieces is not None and len(self.views) < VIEWS_AT_A_TIME // 2:
            last = min(self.next_piece + VIEWS_AT_A_TIME, len(self.pieces))
            self.views.extend(self.memory.views(self.pieces, self.next_piece, last))
            self.next_piece = last
        output = self.session.output
        head = [memoryview(bytes(output))] if output else []
        try:
            sent = self.sock.sendmsg([*head, *itertools.islice(self.views, VIEWS_AT_A_TIME)])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise WireError(CloseReason.RESET, str(error)) from None
        left = sent - min(sent, len(output))
        del output[: sent - left]
        while left:
            size = len(self.views[0])
            if size > left:
                self.views[0] = self.views[0][left:]
                break
            self.views.popleft()
            left -= size
        if self.pieces is not None and not self.views and self.next_piece == len(self.pieces) and not output:
            self.pieces = None
        return sent


class TcpServer:
    """Listens from the start. `memory` is asked for what is registered at the time of each request."""

    def __init__(
        self,
        identity: Identity,
        options: TcpOptions,
        memory: Callable[[], RegisteredMemory],
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._options = options
        self._memory = memory
        self._clock = clock
        self._readers: dict[socket.socket, _Reader] = {}
        self._is_closing = False
        self._lock = threading.Lock()
        self._closed: dict[CloseReason, int] = {}
        self._selector = selectors.DefaultSelector()
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address[:2], family=family, backlog=64)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._commands = Commands()
        self._selector.register(self._commands.woken, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hybridkv-peer-server", daemon=True)
        self._thread.start()

    def closed(self) -> dict[CloseReason, int]:
        """Connections that ended, by reason."""
        with self._lock:
            return self._closed.copy()

    def forget(self, regions: Sequence[int]) -> None:
        """Come back when nothing reads these regions: answers that do are broken off."""
        done = threading.Event()
        gone = np.array(sorted(regions), dtype=np.int64)

        def break_off() -> None:
            for reader in list(self._readers.values()):
                if reader.pieces is not None and bool(np.isin(reader.pieces.regions, gone).any()):
                    self._close(reader, CloseReason.DONE)
            done.set()

        if self._thread.is_alive():
            self._commands.post(break_off)
            while not done.wait(0.1) and self._thread.is_alive():
                pass

    def close(self, timeout_s: float) -> bool:
        """Serve nobody any more. False when the thread has not ended in time."""
        self._is_closing = True
        self._commands.post(lambda: None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_closing:
            for part in (self._look, self._commands.obey, self._sweep):
                self._safely(part)
        for reader in list(self._readers.values()):
            self._close(reader, CloseReason.DONE)
        self._commands.obey()
        self._commands.close()
        self._listener.close()
        self._selector.close()

    def _safely(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception:  # without this thread nobody would be answered any more
            logger.exception("data connections met a bug")

    def _look(self) -> None:
        for key, _ in self._selector.select(1.0 if self._readers else None):
            if key.fileobj is self._commands.woken:
                self._commands.drain()
            elif key.fileobj is self._listener:
                self._accept()
            elif (reader := self._readers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._serve(reader)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            # Out of files, perhaps: it stays readable, and without a pause this thread would spin.
            time.sleep(0.01)
            return
        limits = self._options.limits
        strangers = [each for each in self._readers.values() if each.session.established is None]
        if len(strangers) >= limits.max_handshakes:
            self._close(strangers[who_gives_way([each.host for each in strangers])], CloseReason.TOO_MANY)
        friends = [each for each in self._readers.values() if each.session.established is not None]
        if len(friends) >= limits.max_connections and not self._leave_idle(friends):
            sock.close()
            self._count(CloseReason.TOO_MANY)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        handshake = ServerHandshake(self._identity, Channel.DATA, secrets.token_bytes(32))
        reader = _Reader(sock, str(address[0]), Session(handshake, limits), self._clock())
        self._readers[sock] = reader
        self._selector.register(sock, reader.events)

    def _leave_idle(self, readers: Sequence[_Reader]) -> bool:
        """Make room: who has asked for nothing for longest connects anew when it wants something."""
        idle = [each for each in readers if not each.is_answering]
        if idle:
            self._close(min(idle, key=lambda each: each.moved_s), CloseReason.TOO_MANY)
        return bool(idle)

    def _serve(self, reader: _Reader) -> None:
        before = reader.events
        try:
            if not reader.is_answering:
                self._receive(reader)
            self._send(reader)
        except WireError as error:
            self._close(reader, error.reason)
            return
        except Exception:  # a bug costs this connection, and no other
            logger.exception("a data connection met a bug")
            self._close(reader, CloseReason.HANDLER)
            return
        if reader.events != before:
            self._selector.modify(reader.sock, reader.events)

    def _send(self, reader: _Reader) -> None:
        total = 0
        while reader.is_answering and total < SENT_AT_A_TIME:
            sent = reader.send_some()
            if not sent:
                return
            total += sent
            reader.moved_s = self._clock()
            if not reader.is_answering:
                self._next_request(reader)

    def _receive(self, reader: _Reader) -> None:
        try:
            data = reader.sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise WireError(CloseReason.RESET, str(error)) from None
        if not data:
            raise WireError(reader.session.ended(), "the other side closed the connection")
        reader.session.feed(data)
        self._next_request(reader)

    def _next_request(self, reader: _Reader) -> None:
        body = reader.session.next()
        if body is None:
            return
        read = decode_read(body)
        columns = unpack_columns(read.columns, 3, self._options.max_ranges)
        memory = self._memory()
        why_not = memory.why_not("remote", *columns)
        if why_not is not None:
            reader.session.seal(encode(Answer(read.request, 0, why_not[:256])))
            return
        reader.session.seal(encode(Answer(read.request, int(columns[2].sum()))))
        reader.memory = memory
        reader.next_piece = 0
        reader.pieces = Pieces.of(*columns) if len(columns[0]) else None

    def _sweep(self) -> None:
        now_s = self._clock()
        for reader in list(self._readers.values()):
            if reader.session.established is None:
                if now_s - reader.began_s > self._options.limits.handshake_timeout_s:
                    self._close(reader, CloseReason.TOO_SLOW)
            elif reader.is_answering and now_s - reader.moved_s > self._options.send_timeout_s:
                self._close(reader, CloseReason.BACKLOG)

    def _close(self, reader: _Reader, reason: CloseReason) -> None:
        if self._readers.pop(reader.sock, None) is None:
            return
        reader.views.clear()
        reader.pieces = None
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(reader.sock)
        with contextlib.suppress(OSError):
            if words := reader.session.last_words(reason):
                reader.sock.send(words)
        with contextlib.suppress(OSError):
            reader.sock.close()
        self._count(reason)
        logger.debug("a data connection ended: %s", reason)

    def _count(self, reason: CloseReason) -> None:
        with self._lock:
            self._closed[reason] = self._closed.get(reason, 0) + 1
