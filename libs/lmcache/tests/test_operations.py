"""Order of calls in an operation, with a table of answers as the server: which calls are made and what is released."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from caches import digests_of

from hybridkv.lmcache.calls import CallAnswer, CallFailure, CallFailureReason, CallResult
from hybridkv.lmcache.connection import Ready
from hybridkv.lmcache.detection import ServerFacts
from hybridkv.lmcache.keys import prefix_words
from hybridkv.lmcache.operations import Operations, Pages, Prefix, PrefixHit
from hybridkv.lmcache.pool import TakenPages
from hybridkv.lmcache.wire import CODEC_0_5_7RC2, MoveAnswer, Registration, RpcCall

CHUNK = 256
PREFIX = Prefix("model", 1, prefix_words(digests_of("prefix", 2), CHUNK))


class FakeChannel:
    """Answers each call at once from a table; other calls with None."""

    def __init__(self, answers: dict[str, CallResult[Any]]) -> None:
        self.answers = answers
        self.calls: list[str] = []
        self.timeouts_s: list[float] = []
        self.on_late: Callable[[bool], None] | None = None
        """Of the last call that has one."""

    def call(
        self,
        call: RpcCall[Any],
        timeout_s: float,
        on_end: Callable[[CallResult[Any]], None],
        on_late: Callable[[bool], None] | None = None,
    ) -> None:
        self.calls.append(call.name)
        self.timeouts_s.append(timeout_s)
        self.on_late = on_late or self.on_late
        on_end(self.answers.get(call.name, CallAnswer(None)))


def _ready(registration: Registration | None = None) -> Ready:
    return Ready(ServerFacts("0.5.7rc2", True, 0, False, "blake3"), CODEC_0_5_7RC2, CHUNK, registration)


def test_sessions_with_a_lost_end_are_ended_when_the_server_returns() -> None:
    channel = FakeChannel({"end_session": CallFailure(CallFailureReason.LOST)})
    posted: list[Callable[[Ready], None]] = []
    connection: Any = SimpleNamespace(channel=channel, state=_ready(), ready=_ready(), post=posted.append)
    operations = Operations(connection, lambda: 0.0)
    for session in ("first", "second"):
        operations.release(PrefixHit(PREFIX, None, 1, session))
    connection.ready = None
    operations.release(PrefixHit(PREFIX, None, 1, "third"))
    channel.calls.clear()
    assert len(posted) == 1
    posted[0](_ready())
    assert channel.calls == ["end_session"] * 3
    assert len(posted) == 2, "these ends are lost too"
    channel.answers.clear()
    for _ in range(2):
        posted[1](_ready())
        assert channel.calls == ["end_session"] * 6 and len(posted) == 2


@pytest.mark.parametrize("reason", [CallFailureReason.LOST, CallFailureReason.TIMEOUT])
@pytest.mark.parametrize("is_answered", [False, True])
def test_the_session_of_a_lost_store_is_ended(reason: CallFailureReason, is_answered: bool) -> None:
    channel = FakeChannel({"store": CallFailure(reason)})
    posted: list[Callable[[Ready], None]] = []
    ready = _ready(Registration(1, "model", 1, ()))
    connection: Any = SimpleNamespace(channel=channel, state=ready, ready=ready, post=posted.append)
    settled: list[bool] = []
    Operations(connection, lambda: 0.0).store(
        PREFIX, 0, (0, 2), Pages(TakenPages(1, {}), []), 1.0, lambda ended: None, lambda: settled.append(True)
    )
    assert channel.calls == ["store"] and not settled
    if reason is CallFailureReason.TIMEOUT:
        assert channel.on_late is not None and not posted
        channel.on_late(is_answered)
        assert settled == [True] * is_answered, "the server may still read the pages"
    for task in posted:
        task(ready)
    assert channel.calls == ["store", "end_session"]


def test_sessions_are_ended_with_the_next_one_if_the_task_was_dropped() -> None:
    channel = FakeChannel({"end_session": CallFailure(CallFailureReason.LOST)})
    connection: Any = SimpleNamespace(channel=channel, state=_ready(), ready=_ready(), post=lambda errand: None)
    operations = Operations(connection, lambda: 0.0)
    operations.release(PrefixHit(PREFIX, None, 1, "first"))
    channel.answers.clear()
    channel.calls.clear()
    for session, number in (("second", 2), ("third", 1)):
        operations.release(PrefixHit(PREFIX, None, 1, session))
        assert channel.calls == ["free_lookup_locks"] + ["end_session"] * number
        channel.calls.clear()


def _look_up(channel: FakeChannel) -> CallResult[PrefixHit]:
    ready = _ready()
    connection: Any = SimpleNamespace(channel=channel, state=ready, ready=ready)
    ended: list[CallResult[PrefixHit]] = []
    Operations(connection, lambda: 0.0).lookup(PREFIX, None, 1.0, ended.append)
    assert len(ended) == 1
    return ended[0]


@pytest.mark.parametrize(
    ("poll", "lookup"),
    [
        (CallFailure(CallFailureReason.UNSENT), CallFailure(CallFailureReason.TIMEOUT, "lookup")),
        (CallFailure(CallFailureReason.BUSY), CallFailure(CallFailureReason.BUSY)),
        (CallFailure(CallFailureReason.TIMEOUT), CallFailure(CallFailureReason.TIMEOUT)),
        (CallFailure(CallFailureReason.MALFORMED), CallFailure(CallFailureReason.MALFORMED)),
    ],
    ids=["unsent", "busy", "timeout", "malformed"],
)
def test_a_sent_lookup_is_released_however_its_poll_ends(poll: CallFailure, lookup: CallFailure) -> None:
    channel = FakeChannel({"query_prefetch_status": poll})
    assert _look_up(channel) == lookup
    assert channel.calls == ["lookup", "query_prefetch_status", "free_lookup_locks", "end_session"]


@pytest.mark.parametrize("reason", [CallFailureReason.UNSENT, CallFailureReason.BUSY])
def test_a_lookup_that_was_not_sent_releases_nothing(reason: CallFailureReason) -> None:
    channel = FakeChannel({"lookup": CallFailure(reason)})
    assert _look_up(channel) == CallFailure(reason)
    assert channel.calls == ["lookup"]


def test_a_lookup_with_a_hit_keeps_its_locks() -> None:
    channel = FakeChannel({"query_prefetch_status": CallAnswer(2)})
    found = _look_up(channel)
    assert isinstance(found, CallAnswer) and found.value.num_chunks == 2
    assert channel.calls == ["lookup", "query_prefetch_status"]


def _retrieve(channel: FakeChannel, instance: int, timeout_s: float) -> None:
    ready = _ready(Registration(1, "model", 1, ()))
    connection: Any = SimpleNamespace(channel=channel, state=ready, ready=ready)
    settled: list[bool] = []
    Operations(connection, lambda: 0.0).retrieve(
        PrefixHit(PREFIX, 0, 2, "session"),
        0,
        Pages(TakenPages(instance, {}), []),
        timeout_s,
        lambda ended: None,
        lambda: settled.append(True),
    )
    assert settled == [True]


@pytest.mark.parametrize("reason", [CallFailureReason.UNSENT, CallFailureReason.BUSY])
def test_a_retrieve_that_was_not_sent_releases_its_locks(reason: CallFailureReason) -> None:
    channel = FakeChannel({"retrieve": CallFailure(reason)})
    _retrieve(channel, 1, 1.0)
    assert channel.calls == ["retrieve", "free_lookup_locks", "end_session"]


def test_a_server_releases_the_locks_of_a_retrieve() -> None:
    channel = FakeChannel({"retrieve": CallAnswer(MoveAnswer(True, True))})
    _retrieve(channel, 1, 1.0)
    assert channel.calls == ["retrieve", "end_session"]


@pytest.mark.parametrize("instance", [1, 0], ids=["unsent", "void pages"])
def test_a_retrieve_without_time_left_has_time_to_release_its_locks(instance: int) -> None:
    channel = FakeChannel({"retrieve": CallFailure(CallFailureReason.UNSENT)})
    _retrieve(channel, instance, 0.0)
    assert channel.timeouts_s[channel.calls.index("free_lookup_locks")] >= 1.0
