"""Connection to one server: detects its version, agrees on a chunk size, registers memory, and sends heartbeats.

If the server is down or unusable, calls fail at once with the reason. Each reconnect repeats the detection, because a
new server process may have another version or chunk size.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from hybridkv.lmcache.calls import CallAnswer, CallFailure, CallFailureReason, CallResult
from hybridkv.lmcache.channel import Channel
from hybridkv.lmcache.detection import ServerFacts, detect
from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.http import HttpAddress, HttpError, get_json
from hybridkv.lmcache.wire import Codec, Registration, RpcCall

logger = logging.getLogger(__name__)

T = TypeVar("T")


MAX_TASKS = 256
CLOSE_S = 2.0
"""Default timeout of `Connection.close`, in seconds."""
_END_S = 0.5


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """ZMQ and HTTP address of a server."""

    host: str
    port: int
    http_port: int


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Timeouts and limits of a connection.

    Args:
        call_timeout_s: timeout of the connection's own calls.
        beat_s: heartbeat interval.
        max_missed_beats: consecutive missed heartbeats after which the server is down.
        retry_s: first pause between connection attempts; doubles up to `retry_max_s`.
        retry_max_s: longest pause. The default is short, because the server is on this host and an attempt is cheap.
    """

    call_timeout_s: float = 5.0
    beat_s: float = 2.0
    max_missed_beats: int = 3
    retry_s: float = 0.5
    retry_max_s: float = 2.0


DEFAULT_OPTIONS = ConnectionOptions()


@dataclass(frozen=True, slots=True)
class Ready:
    """Usable server.

    Args:
        facts: detected version and settings.
        codec: codec of the server's version.
        chunk_tokens: agreed chunk size.
        registration: registered memory of this process, if any.
    """

    facts: ServerFacts
    codec: Codec
    chunk_tokens: int
    registration: Registration | None


@dataclass(frozen=True, slots=True)
class Down:
    """Unusable server, with the reason. The connection retries."""

    reason: str
    refusal: LMCacheConfigurationError | None = None
    """Set if the server answers but is unsuitable. The connection still retries: an operator may replace the server."""


ServerState: TypeAlias = Ready | Down


class ServerSession(Protocol):
    """Registration of a process at a server."""

    @property
    def alignment_tokens(self) -> int:
        """Number of tokens; the chunk size must be a multiple of this number."""
        ...

    def registration_for(self, facts: ServerFacts, chunk_tokens: int) -> Registration | None:
        """Memory to register with this server; None for a lookup-only process.

        Called on the connection's thread for each new connection, when no call of an older connection is open.

        Raises:
            LMCacheConfigurationError: this server cannot be used.
        """
        ...


class _SilentError(Exception):
    """The server did not answer a call that the connection needs."""


class Connection:
    """Connection to one server. Starts to connect at once.

    Args:
        address: address of the server.
        session: registration of this process.
        options: timeouts and limits.
        clock: returns seconds.
    """

    def __init__(
        self,
        address: ServerAddress,
        session: ServerSession,
        options: ConnectionOptions = DEFAULT_OPTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._session = session
        self._options = options
        self._changed = threading.Condition()
        self._state: ServerState = Down("not tried yet")
        self._was_ready = False
        self._tasks: deque[Callable[[Ready], None]] = deque(maxlen=MAX_TASKS)
        self._registered: int | None = None
        """Instance of the last registration."""
        self._is_check_due = False
        self._is_cut = False
        self._is_closing = False
        self._is_closed = False
        self.channel = Channel(address.host, address.port, clock, self._cut)
        self._thread = threading.Thread(target=self._run, name="hybridkv-lmcache-keeper", daemon=True)
        self._thread.start()

    # For any thread.

    @property
    def state(self) -> ServerState:
        return self._state

    @property
    def ready(self) -> Ready | None:
        """The usable server, or None."""
        state = self._state
        return state if isinstance(state, Ready) else None

    @property
    def was_ready(self) -> bool:
        """True if the server has been usable at any time."""
        return self._was_ready

    def wait_ready(self, timeout_s: float) -> ServerState:
        """Waits until the server is ready or refused, at most `timeout_s`. Returns the state."""

        def is_settled() -> bool:
            state = self._state
            return isinstance(state, Ready) or state.refusal is not None

        with self._changed:
            self._changed.wait_for(is_settled, timeout_s)
        return self._state

    def check_registration(self) -> None:
        """Makes the connection's thread send a heartbeat now. A heartbeat registers this process again."""
        with self._changed:
            self._is_check_due = True
            self._changed.notify_all()

    def post(self, task: Callable[[Ready], None]) -> None:
        """Queues a blocking task for the connection's thread, which runs tasks while the server is usable.

        If more than `MAX_TASKS` tasks are queued, the oldest task is dropped.
        """
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    @property
    def address(self) -> ServerAddress:
        return self._address

    def reconnect(self) -> None:
        """Drops the connection to the server and connects again."""
        self._cut()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Closes within about `timeout_s`. Repeatable.

        Open calls get half of that time. Then this process unregisters, and the remaining calls end with CLOSED.
        """
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
        ends_s = time.monotonic() + timeout_s
        if self.ready is not None:
            self.channel.drain(timeout_s / 2)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, ends_s - time.monotonic()))
        self.channel.close(timeout_s)
        self._thread.join(_END_S)  # pending calls of this thread have ended, except over HTTP

    def _cut(self) -> None:
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()

    # On the connection's thread.

    def _run(self) -> None:
        retry_s = self._options.retry_s
        while not self._is_closed:
            self._is_cut = False
            try:
                ready = self._begin()
            except Exception as error:
                self._set(self._down(error))
                self._pause(retry_s)
                retry_s = min(2 * retry_s, self._options.retry_max_s)
                continue
            retry_s = self._options.retry_s
            self._set(ready)
            reason = self._watch(ready)
            self._set(Down(reason))
            if self._is_closed:
                self._leave(ready)
            else:
                logger.warning("LMCache's server at %s is down (%s): it is not used", self._address, reason)
                self.channel.drop()

    def _down(self, error: Exception) -> Down:
        if isinstance(error, LMCacheConfigurationError):
            before = self._state
            if not isinstance(before, Down) or str(before.refusal) != str(error):
                logger.warning("LMCache's server at %s cannot be used: %s", self._address, error)
            return Down("refused", error)
        if not isinstance(error, HttpError | _SilentError):
            logger.exception("unexpected error while connecting to LMCache's server")
        return Down(str(error))

    def _begin(self) -> Ready:
        options = self._options
        http = HttpAddress(self._address.host, self._address.http_port)
        facts = detect(http, options.call_timeout_s, get_json)
        codec = facts.codec
        self._require_answer(codec.noop())
        self._require_answer(codec.probe())
        alignment = self._session.alignment_tokens
        chunk_tokens = self._agree_on_chunk(codec, alignment)
        registration = self._session.registration_for(facts, chunk_tokens)
        if registration is not None:
            self._require_answer(codec.register(registration))
            if self._registered not in (None, registration.instance):
                # A server that was only slow still has the old registration; a new server does not.
                self._call(codec.unregister(self._registered))
            self._registered = registration.instance
        self._require_answer(codec.ping(registration.instance if registration else None))
        logger.info(
            "LMCache %s at %s, chunks of %d tokens (a multiple of %d)",
            facts.version,
            self._address,
            chunk_tokens,
            alignment,
        )
        return Ready(facts, codec, chunk_tokens, registration)

    def _agree_on_chunk(self, codec: Codec, alignment: int) -> int:
        ended = self._call(codec.chunk_tokens(alignment))
        if isinstance(ended, CallFailure) and codec.negotiates and ended.reason is CallFailureReason.TIMEOUT:
            # A server does not answer if another engine has settled another chunk size. The server's configuration
            # does not show that size.
            ended = self._call(codec.settled_chunk_tokens())
        if isinstance(ended, CallFailure):
            raise _SilentError(f"no answer about the chunk: {ended}")
        chunk_tokens = ended.value
        if chunk_tokens <= 0 or chunk_tokens % alignment:
            up = -(-max(1, chunk_tokens) // alignment) * alignment
            raise LMCacheConfigurationError(
                "chunk_size",
                f"a multiple of {alignment} tokens, the alignment of this engine's blocks",
                chunk_tokens,
                f"start the server with --chunk-size {up}, or one of its own for this model",
            )
        return chunk_tokens

    def _watch(self, ready: Ready) -> str:
        """Sends heartbeats and runs tasks until the server is down, the connection is cut, or this side closes. Returns
        the reason."""
        missed = 0
        while True:
            self._pause(self._options.beat_s, lambda: self._is_check_due or self._is_cut or bool(self._tasks))
            if self._is_closed:
                return "closed"
            if self._is_cut:
                return "the connection is cut"
            self._is_check_due = False
            if self._tasks:  # one task per heartbeat: tasks are slow, and heartbeats must continue
                self._run_task(self._tasks.popleft(), ready)
            missed = 0 if self._send_heartbeat(ready) else missed + 1
            if missed >= self._options.max_missed_beats:
                return f"{missed} heartbeats without an answer"

    def _run_task(self, task: Callable[[Ready], None], ready: Ready) -> None:
        try:
            task(ready)
        except Exception:
            logger.exception("a task for LMCache's server failed")

    def _send_heartbeat(self, ready: Ready) -> bool:
        """Registers this process's memory again, if any, and pings the server. True if the server answers all calls."""
        # A server drops the registration of an idle process, so repeat it. A repeated registration has no other effect.
        if ready.registration is not None and isinstance(
            self._call(ready.codec.register(ready.registration)), CallFailure
        ):
            return False
        instance = ready.registration.instance if ready.registration else None
        return isinstance(self._call(ready.codec.ping(instance)), CallAnswer)

    def _leave(self, ready: Ready) -> None:
        if ready.registration is not None:
            self._call(ready.codec.unregister(ready.registration.instance))

    def _require_answer(self, call: RpcCall[T]) -> T:
        ended = self._call(call)
        if isinstance(ended, CallFailure):
            raise _SilentError(f"no answer: {ended}")
        return ended.value

    def _call(self, call: RpcCall[T]) -> CallResult[T]:
        """Sends a call and waits for its result."""
        done = threading.Event()
        answers: list[CallResult[T]] = []

        def end(ended: CallResult[T]) -> None:
            answers.append(ended)
            done.set()

        self.channel.call(call, self._options.call_timeout_s, end)
        done.wait()  # every call ends
        return answers[0]

    def _pause(self, pause_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or is_over(), pause_s)

    def _set(self, state: ServerState) -> None:
        with self._changed:
            self._state = state
            self._was_ready |= isinstance(state, Ready)
            self._changed.notify_all()
