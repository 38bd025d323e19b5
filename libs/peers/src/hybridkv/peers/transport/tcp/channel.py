"""One data connection of the client: what was asked for on it, and the answer that is arriving. For one thread.

It reads exactly what belongs to a head, and everything else straight into registered memory.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
from collections import deque

from hybridkv.peers.transport.memory import RegisteredMemory
from hybridkv.peers.transport.tcp.parts import Part
from hybridkv.peers.transport.tcp.protocol import MAX_ANSWER_BYTES, Answer, Read, decode_answer, encode
from hybridkv.peers.wire import CloseReason, Session, WireError

ASKED_AT_A_TIME = 2
"""Requests on their way on one connection: the next is there when an answer ends."""
VIEWS_AT_A_TIME = 256
RECEIVED_AT_A_TIME = 8 << 20
WOKEN_BYTES = 512 << 10
"""Of an answer, that the system waits for before it wakes the thread: each time costs what copying many pages does."""
_LENGTH_BYTES = 4


class Channel:
    def __init__(self, sock: socket.socket, session: Session, now_s: float) -> None:
        self.sock = sock
        self.session = session
        self.began_s = now_s
        self.is_connecting = True
        self.asked: deque[tuple[int, Part]] = deque()
        self._numbers = itertools.count()
        self._head = bytearray()
        self._head_bytes = _LENGTH_BYTES
        self._views: deque[memoryview] = deque()
        self._next_piece = 0
        self._left_bytes = 0
        self._woken_bytes = 1

    @property
    def events(self) -> int:
        if self.is_connecting:
            return selectors.EVENT_WRITE
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.session.output else 0)

    @property
    def has_room(self) -> bool:
        return self.session.established is not None and len(self.asked) < ASKED_AT_A_TIME

    def connected(self) -> None:
        if number := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise WireError(CloseReason.UNREACHABLE, f"errno {number}")
        self.is_connecting = False

    def ask(self, part: Part) -> None:
        number = next(self._numbers)
        if not self.session.seal(encode(Read(number, part.columns))):
            raise WireError(CloseReason.BACKLOG, "requests do not get out")
        self.asked.append((number, part))

    def flush(self) -> None:
        if not self.session.output:
            return
        try:
            sent = self.sock.send(self.session.output)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise WireError(CloseReason.RESET, str(error)) from None
        del self.session.output[:sent]

    def receive(self, memory: RegisteredMemory) -> list[tuple[Part, str]]:
        """Take what is there. Parts that are over, each with why it was refused, or nothing. `WireError` ends all."""
        over: list[tuple[Part, str]] = []
        total = 0
        while total < RECEIVED_AT_A_TIME:
            received = self._receive_bytes(memory, over) if self._left_bytes else self._receive_head(over)
            if not received:
                break
            total += received
        self._wake_at(min(WOKEN_BYTES, self._left_bytes) or 1)
        return over

    def close(self) -> None:
        self._views.clear()
        with contextlib.suppress(OSError):
            self.sock.close()

    def _wake_at(self, num_bytes: int) -> None:
        """The socket is readable when so much is there, or when it ends. Never more than is still to come."""
        if num_bytes != self._woken_bytes:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._woken_bytes = num_bytes

    def _receive_head(self, over: list[tuple[Part, str]]) -> int:
        try:
            data = self.sock.recv(self._head_bytes - len(self._head))
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise WireError(CloseReason.RESET, str(error)) from None
        if not data:
            raise WireError(CloseReason.ENDED, "the other side closed the connection")
        self._head += data
        if len(self._head) < self._head_bytes:
            return len(data)
        if self._head_bytes == _LENGTH_BYTES:
            size = int.from_bytes(self._head, "big")
            if not 0 < size <= MAX_ANSWER_BYTES:
                raise WireError(CloseReason.OVERSIZED, f"the head of an answer has {size} bytes")
            self._head_bytes += size
            return len(data)
        self.session.feed(bytes(self._head))
        self._head = bytearray()
        self._head_bytes = _LENGTH_BYTES
        body = self.session.next()
        if body is not None:
            self._begin_answer(decode_answer(body), over)
        return len(data)

    def _begin_answer(self, answer: Answer, over: list[tuple[Part, str]]) -> None:
        if not self.asked or answer.request != self.asked[0][0]:
            raise WireError(CloseReason.UNEXPECTED, "an answer to what was not asked")
        part = self.asked[0][1]
        if answer.refusal:
            self.asked.popleft()
            over.append((part, answer.refusal))
            return
        if answer.num_bytes != part.num_bytes:
            raise WireError(CloseReason.UNEXPECTED, f"{answer.num_bytes} bytes for {part.num_bytes}")
        self._left_bytes = part.num_bytes
        self._next_piece = 0

    def _receive_bytes(self, memory: RegisteredMemory, over: list[tuple[Part, str]]) -> int:
        part = self.asked[0][1]
        if len(self._views) < VIEWS_AT_A_TIME // 2 and self._next_piece < len(part.local):
            last = min(self._next_piece + VIEWS_AT_A_TIME, len(part.local))
            self._views.extend(memory.views(part.local, self._next_piece, last))
            self._next_piece = last
        try:
            received = self.sock.recvmsg_into(list(itertools.islice(self._views, VIEWS_AT_A_TIME)))[0]
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise WireError(CloseReason.RESET, str(error)) from None
        if not received:
            raise WireError(CloseReason.TRUNCATED, "the other side closed the connection within an answer")
        self._left_bytes -= received
        left = received
        while left:
            size = len(self._views[0])
            if size > left:
                self._views[0] = self._views[0][left:]
                break
            self._views.popleft()
            left -= size
        if not self._left_bytes:
            self.asked.popleft()
            over.append((part, ""))
        return received
