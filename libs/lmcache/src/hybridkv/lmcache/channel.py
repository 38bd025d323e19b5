"""Channel: the thread that sends calls to one server and receives answers, with a deadline for each call.

Other threads queue calls, up to a limit, and never wait. Each call ends once: with its answer, at its deadline, or when
the connection is dropped or closed. A late answer is still reported, because the pages of the call are in use until the
answer comes.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from hybridkv.lmcache.calls import CallAnswer, CallFailure, CallFailureReason, CallResult
from hybridkv.lmcache.errors import LMCacheProtocolError
from hybridkv.lmcache.wire import MAX_FRAME_BYTES, MAX_FRAMES, MalformedError, RpcCall, read_answer

logger = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_S = 1.0
"""Longest poll, in seconds."""
_BATCH = 256
"""Maximum answers read before deadlines are checked."""
_RECONNECT_S = 0.5
"""Pause between attempts to create a socket, in seconds, if files or memory have run out."""
MAX_CALLS = 4096
"""Maximum open calls and timers that continue an operation; further calls fail with BUSY."""
MAX_LATE = 4096
"""Maximum calls past their deadline with a pending `on_late`; one more drops the oldest of them."""


@dataclass(slots=True)
class _OpenCall:
    call: RpcCall[Any]
    until_s: float
    on_end: Callable[[Any], None] | None
    on_late: Callable[[bool], None] | None


class Channel:
    """ZMQ connection to a server. A dropped connection is opened again.

    Callbacks of calls and of `after` must not block. They run on the channel's thread; after its end, on the thread of
    the caller.

    Args:
        host: host of the server's ZMQ side.
        port: port of the server's ZMQ side.
        clock: returns seconds.
        on_cut: called on the channel's thread after a disconnect or a failed send, when all calls in flight have ended
            with LOST. Not called after `drop`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        clock: Callable[[], float] = time.monotonic,
        on_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        self._clock = clock
        self._on_cut = on_cut
        self._context = zmq.Context(io_threads=1)
        self._commands: deque[Callable[[], None]] = deque()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._uids = itertools.count(1)
        self._open_calls: dict[bytes, _OpenCall] = {}
        self._late: dict[bytes, _OpenCall] = {}
        """Calls past their deadline, oldest first."""
        self._due_s = math.inf
        """Earliest deadline."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._num_open = 0
        """Calls, and timers that continue an operation, that have not ended."""
        self._is_closing = False
        self._is_over = False
        """The thread runs no more commands."""
        self._socket, self._monitor = self._connect()
        self._thread = threading.Thread(target=self._run, name="hybridkv-lmcache", daemon=True)
        self._thread.start()

    # For any thread.

    def call(
        self,
        call: RpcCall[T],
        timeout_s: float,
        on_end: Callable[[CallResult[T]], None],
        on_late: Callable[[bool], None] | None = None,
    ) -> None:
        """Sends a call. `on_end` is called exactly once.

        `on_late` is called after an `on_end` with TIMEOUT: with True when the answer comes, or with False if the
        connection is dropped before. It is not called if the channel is closed before, or if more than `MAX_LATE` later
        calls time out.
        """
        reason = self._begin()
        if reason is not None:
            self._post(lambda: on_end(CallFailure(reason, call.name)))
            return
        open_call = _OpenCall(call, self._clock() + timeout_s, on_end, on_late)
        self._post(lambda: self._send(open_call))

    def after(self, delay_s: float, action: Callable[[], None], *, continues_operation: bool = False) -> None:
        """Runs `action` on the channel's thread after `delay_s`, or earlier when the channel closes.

        Args:
            delay_s: delay in seconds.
            action: callback.
            continues_operation: True if `action` continues an operation; then `drain` waits for the action.
        """
        due_s = self._clock() + delay_s
        if continues_operation:
            with self._lock:
                self._num_open += 1

        def act() -> None:
            try:
                action()
            finally:
                if continues_operation:
                    self._count_ended()

        def keep() -> None:
            if self._is_closing:
                act()
            else:
                heapq.heappush(self._timers, (due_s, next(self._uids), act))

        self._post(keep)

    def drop(self) -> None:
        """Drops the connection and opens another. Calls in flight end with LOST; late answers are discarded."""
        self._post(self._drop)

    @property
    def num_open(self) -> int:
        """Number of calls, and of timers that continue an operation, that have not ended."""
        return self._num_open

    def drain(self, timeout_s: float) -> bool:
        """Waits until `num_open` is 0: every call and its callbacks have ended. Returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_open, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Ends all calls with CLOSED. Returns False if the thread is still in a callback. Repeatable."""
        if threading.current_thread() is self._thread:
            raise LMCacheProtocolError("close: called on the channel's own thread")
        with self._lock:
            self._is_closing = True
        self._wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _begin(self) -> CallFailureReason | None:
        with self._lock:
            if self._is_closing:
                return CallFailureReason.CLOSED
            if self._num_open >= MAX_CALLS:
                return CallFailureReason.BUSY
            self._num_open += 1
            return None

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._commands.append(command)
        if is_over:
            command()  # the thread has ended
        else:
            self._wake()

    def _wake(self) -> None:
        # If the socket is full, the thread is already woken. If the socket is closed, the thread has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # On the channel's thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._poll_sockets()
        finally:
            self._finish()

    def _poll_sockets(self) -> None:
        poller = zmq.Poller()
        if not self._socket.closed:
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        ready = dict(poller.poll(int(self._poll_timeout_s() * 1000) + 1))
        if self._woken.fileno() in ready:
            with contextlib.suppress(OSError):
                self._woken.recv(4096)
        self._run_commands()
        for _ in range(_BATCH):
            if self._socket.closed or not self._safely(self._read):
                break
        if self._monitor in ready and not self._monitor.closed:
            self._safely(self._handle_disconnect)
        self._run_due()

    def _handle_disconnect(self) -> None:
        """Handles a monitor event. The only event is a disconnect."""
        self._monitor.recv_multipart(zmq.NOBLOCK)
        self._drop()
        self._on_cut()

    def _run_commands(self) -> None:
        for _ in range(len(self._commands)):
            self._safely(self._commands.popleft())

    def _poll_timeout_s(self) -> float:
        if self._commands:
            return 0.0
        due_s = min(self._due_s, self._timers[0][0]) if self._timers else self._due_s
        return min(IDLE_S, max(0.0, due_s - self._clock()))

    def _run_due(self) -> None:
        now_s = self._clock()
        if now_s >= self._due_s:
            self._expire(now_s)
        while self._timers and self._timers[0][0] <= now_s:
            self._safely(heapq.heappop(self._timers)[2])

    def _safely(self, action: Callable[[], object]) -> object:
        """Runs `action` and logs an exception, so that a bug in one call does not stop the others."""
        try:
            return action()
        except Exception:
            logger.exception("unexpected error on the thread of LMCache's server")
            return None

    def _connect(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        sock = self._context.socket(zmq.DEALER)
        # Do not queue calls without a connection: a call sent later could access reused pages.
        sock.setsockopt(zmq.IMMEDIATE, 1)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, MAX_CALLS)
        sock.setsockopt(zmq.RCVHWM, MAX_CALLS)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        sock.setsockopt(zmq.RECONNECT_IVL, 100)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        sock.setsockopt(zmq.IPV6, 1)
        try:
            monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            sock.connect(self._address)
        except BaseException:
            sock.close(0)
            raise
        return sock, monitor

    def _disconnect(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _drop(self) -> None:
        if self._is_closing:
            return  # `_finish` ends all calls with CLOSED
        self._disconnect()
        open_calls, self._open_calls = self._open_calls, {}
        late, self._late = self._late, {}
        for each in open_calls.values():
            self._end(each, CallFailure(CallFailureReason.LOST, each.call.name))
        for each in late.values():
            self._end_late(each, is_answered=False)
        self._reconnect()

    def _reconnect(self) -> None:
        """Opens another socket. If the open fails, tries again later."""
        if self._is_closing or not self._socket.closed:
            return
        try:
            self._socket, self._monitor = self._connect()
        except zmq.ZMQError as error:
            logger.warning("cannot create a socket for LMCache's server, retrying: %s", error)
            due_s = self._clock() + _RECONNECT_S
            heapq.heappush(self._timers, (due_s, next(self._uids), self._reconnect))

    def _send(self, open_call: _OpenCall) -> None:
        """Sends a call. If there is no connection yet, tries again soon."""
        if self._is_closing or self._clock() >= open_call.until_s:
            self._end(
                open_call,
                CallFailure(
                    CallFailureReason.CLOSED if self._is_closing else CallFailureReason.UNSENT, open_call.call.name
                ),
            )
            return
        uid = next(self._uids).to_bytes(8, "big")
        self._open_calls[uid] = open_call
        self._due_s = min(self._due_s, open_call.until_s)
        try:
            if self._socket.closed:
                raise zmq.Again
            self._socket.send_multipart((uid, open_call.call.operation, *open_call.call.payloads), zmq.NOBLOCK)
        except zmq.Again:
            del self._open_calls[uid]
            heapq.heappush(self._timers, (self._clock() + 0.02, next(self._uids), lambda: self._send(open_call)))
        except Exception:  # a part of the call may be sent, so the connection is unusable
            self._drop()
            self._on_cut()
            raise

    def _expire(self, now_s: float) -> None:
        for uid in [uid for uid, open_call in self._open_calls.items() if open_call.until_s <= now_s]:
            open_call = self._open_calls.pop(uid)
            if open_call.on_late is not None:
                if len(self._late) >= MAX_LATE:
                    del self._late[next(iter(self._late))]
                self._late[uid] = open_call
            self._end(open_call, CallFailure(CallFailureReason.TIMEOUT, open_call.call.name))
        self._due_s = min((open_call.until_s for open_call in self._open_calls.values()), default=math.inf)

    def _read(self) -> bool:
        """Reads one answer. Returns False if there is no answer."""
        frames: list[bytes] = []
        num_frames = 0
        try:
            while True:
                frame = self._socket.recv(zmq.NOBLOCK)
                num_frames += 1
                if num_frames <= MAX_FRAMES:
                    frames.append(frame)
                if not self._socket.getsockopt(zmq.RCVMORE):
                    break
        except zmq.Again:
            return False
        open_call = self._open_calls.pop(frames[0], None)
        if open_call is not None:
            self._end(open_call, self._value(open_call.call, frames, num_frames))
        elif (open_call := self._late.pop(frames[0], None)) is not None:
            self._end_late(open_call, is_answered=True)
        return True  # frames of no call are ignored

    def _value(self, call: RpcCall[Any], frames: list[bytes], num_frames: int) -> CallResult[Any]:
        try:
            if num_frames > MAX_FRAMES:
                raise MalformedError(f"{call.name}: {num_frames} frames")
            value = read_answer(call, frames[1:])
        except MalformedError as error:
            return CallFailure(CallFailureReason.MALFORMED, str(error))
        return CallAnswer(value)

    def _end(self, open_call: _OpenCall, ended: CallResult[Any]) -> None:
        on_end, open_call.on_end = open_call.on_end, None
        if on_end is not None:
            self._safely(lambda: on_end(ended))
        self._count_ended()  # after the callback, so that `drain` waits for the callback

    def _end_late(self, open_call: _OpenCall, *, is_answered: bool) -> None:
        on_late = open_call.on_late
        if on_late is not None:
            self._safely(lambda: on_late(is_answered))

    def _count_ended(self) -> None:
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()

    def _finish(self) -> None:
        with self._lock:
            self._is_closing = True  # also if the thread ends because of a bug
        self._disconnect()
        open_calls, self._open_calls = self._open_calls, {}
        for each in open_calls.values():
            self._end(each, CallFailure(CallFailureReason.CLOSED, each.call.name))
        self._late.clear()
        # Unsent calls are among commands and timers; each ends with CLOSED.
        self._run_commands()
        timers, self._timers = self._timers, []
        for _, _, action in timers:
            self._safely(action)
        with self._lock:
            self._is_over = True
        self._run_commands()
        self._woken.close()
        self._waker.close()
        self._context.destroy(0)
