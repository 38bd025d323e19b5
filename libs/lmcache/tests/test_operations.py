"""What follows what in an operation, where a server is a table: which call is not made, and what is given back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from caches import digests_of

from hybridkv.lmcache.calls import CallAnswer, CallFailure, Ended, Trouble
from hybridkv.lmcache.connection import Ready
from hybridkv.lmcache.detection import ServerFacts
from hybridkv.lmcache.keys import words_of
from hybridkv.lmcache.operations import Operations, Prefix, PrefixHit
from hybridkv.lmcache.wire import CODEC_0_5_7RC2, RpcCall

CHUNK = 256
PREFIX = Prefix("model", 1, words_of(digests_of("prefix", 2), CHUNK))


class PlayedChannel:
    """Answers each call at once, as a test has it; others with nothing."""

    def __init__(self, answers: dict[str, Ended[Any]]) -> None:
        self.answers = answers
        self.calls: list[str] = []

    def call(
        self,
        call: RpcCall[Any],
        timeout_s: float,
        on_end: Callable[[Ended[Any]], None],
        on_late: Callable[[], None] | None = None,
    ) -> None:
        self.calls.append(call.name)
        on_end(self.answers.get(call.name, CallAnswer(None)))


def _ready() -> Ready:
    return Ready(ServerFacts("0.5.7rc2", True, 0, False, "blake3"), CODEC_0_5_7RC2, CHUNK, None)


def test_sessions_whose_end_was_lost_are_ended_once_when_the_server_is_back() -> None:
    channel = PlayedChannel({"end_session": CallFailure(Trouble.LOST)})
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
    posted[0](_ready())
    assert len(channel.calls) == 3 and len(posted) == 1


def test_sessions_are_ended_with_the_next_one_if_the_connection_dropped_the_errand() -> None:
    channel = PlayedChannel({"end_session": CallFailure(Trouble.LOST)})
    connection: Any = SimpleNamespace(channel=channel, state=_ready(), ready=_ready(), post=lambda errand: None)
    operations = Operations(connection, lambda: 0.0)
    operations.release(PrefixHit(PREFIX, None, 1, "first"))
    channel.answers.clear()
    channel.calls.clear()
    for session, number in (("second", 2), ("third", 1)):
        operations.release(PrefixHit(PREFIX, None, 1, session))
        assert channel.calls == ["free_lookup_locks"] + ["end_session"] * number
        channel.calls.clear()


def _looked_up(channel: PlayedChannel) -> Ended[PrefixHit]:
    ready = _ready()
    connection: Any = SimpleNamespace(channel=channel, state=ready, ready=ready)
    ended: list[Ended[PrefixHit]] = []
    Operations(connection, lambda: 0.0).lookup(PREFIX, None, 1.0, ended.append)
    assert len(ended) == 1
    return ended[0]


@pytest.mark.parametrize(
    ("poll", "lookup"),
    [
        (CallFailure(Trouble.UNSENT), CallFailure(Trouble.TIMEOUT, "lookup")),
        (CallFailure(Trouble.BUSY), CallFailure(Trouble.BUSY)),
        (CallFailure(Trouble.TIMEOUT), CallFailure(Trouble.TIMEOUT)),
        (CallFailure(Trouble.MALFORMED), CallFailure(Trouble.MALFORMED)),
    ],
    ids=["unsent", "busy", "timeout", "malformed"],
)
def test_a_lookup_that_was_sent_is_given_back_however_its_poll_ends(poll: CallFailure, lookup: CallFailure) -> None:
    channel = PlayedChannel({"query_prefetch_status": poll})
    assert _looked_up(channel) == lookup
    assert channel.calls == ["lookup", "query_prefetch_status", "free_lookup_locks", "end_session"]


@pytest.mark.parametrize("trouble", [Trouble.UNSENT, Trouble.BUSY])
def test_of_a_lookup_that_never_left_nothing_is_given_back(trouble: Trouble) -> None:
    channel = PlayedChannel({"lookup": CallFailure(trouble)})
    assert _looked_up(channel) == CallFailure(trouble)
    assert channel.calls == ["lookup"]


def test_a_lookup_that_found_something_keeps_it() -> None:
    channel = PlayedChannel({"query_prefetch_status": CallAnswer(2)})
    found = _looked_up(channel)
    assert isinstance(found, CallAnswer) and found.value.num_chunks == 2
    assert channel.calls == ["lookup", "query_prefetch_status"]
