"""A server that stops answering: moves end at their deadline, all of them together, and an end is bounded."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import patience
import pytest

from hybridkv.tiers import FailureReason, Slot, Ticket
from hybridkv.tiers.lmcache import LMCacheMedium, LMCacheOptions, Site, open_medium
from kits.lmcache.scripted_server import Frames, Script, ScriptedServer, polite, silent
from kits.lmcache.server_process import eventually

NUM_MOVES = 142
SIZES = (4096, 1000)
LIVES = frozenset({"ping", "noop", "register_kv_cache"})
"""What a half-open server still answers: enough to be taken for alive."""
TIMEOUT_S = patience.seconds(6.0)
"""Far less than the moves may take."""


def half_open(name: str, frames: Frames) -> list[Frames]:
    return polite(name, frames) if name in LIVES else []


def garbage(name: str, frames: Frames) -> list[Frames]:
    return [[*frames[:3], b"\xc1\xff" * 50]] * 3


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def opened(server: ScriptedServer, **options: float) -> LMCacheMedium:
    """A rank's half that has met its server."""
    site = Site(server.address, uuid.uuid4().bytes, 1, SIZES)
    medium = open_medium(site, 0, LMCacheOptions(**options), time.monotonic)
    assert eventually(lambda: all(shelf.ready for shelf in medium._shelves.values()))
    return medium


def begin(medium: LMCacheMedium) -> None:
    """Loads and stores of both sizes, more than there are pages."""
    for number in range(NUM_MOVES):
        num_bytes = SIZES[number % 2]
        slot, key = Slot(((0, num_bytes),)), uuid.uuid4().bytes
        if number % 3:
            medium.store(Ticket(number), key, slot, [bytes(num_bytes)])
        else:
            medium.load(Ticket(number), key, slot, [bytearray(num_bytes)])


@pytest.mark.parametrize("script", [half_open, pytest.param(silent, marks=pytest.mark.full)])
def test_an_end_is_not_as_long_as_the_moves_that_are_open(server: ScriptedServer, script: Script) -> None:
    medium = opened(server, move_timeout_s=3600.0)
    server.script = script
    begin(medium)
    assert eventually(lambda: "store" in server.calls and "lookup" in server.calls)
    assert not medium.drain(0.0)
    began_s = time.monotonic()
    medium.close()
    assert time.monotonic() - began_s < TIMEOUT_S
    ended = medium.poll()
    assert sorted(completion.ticket for completion in ended) == list(range(NUM_MOVES))
    assert all(completion.failure is not None for completion in ended)


def test_moves_end_together_at_their_deadline_those_that_wait_for_a_page_too(server: ScriptedServer) -> None:
    """One after the other, in pages that never come back, they would take 142 deadlines."""
    move_s = patience.seconds(0.03)
    medium = opened(server, move_timeout_s=move_s)
    server.script = half_open
    began_s = time.monotonic()
    begin(medium)
    assert medium.drain(NUM_MOVES * move_s)
    assert time.monotonic() - began_s < NUM_MOVES * move_s / 2
    reasons = {completion.failure.reason for completion in medium.poll() if completion.failure}
    assert reasons <= {FailureReason.IO, FailureReason.BUSY}
    medium.close()


def test_moves_that_are_answered_with_garbage_end_and_the_tier_serves_again(server: ScriptedServer) -> None:
    medium = opened(server, move_timeout_s=patience.seconds(0.2))
    server.script = garbage
    begin(medium)
    assert medium.drain(TIMEOUT_S)
    ended = medium.poll()
    assert len(ended) == NUM_MOVES and all(completion.failure for completion in ended)
    server.script = polite
    before = server.calls.count("retrieve") + server.calls.count("lookup")

    def is_answered() -> bool:
        medium.load(Ticket(0), b"key", Slot(((0, SIZES[0]),)), [bytearray(SIZES[0])])
        assert medium.drain(TIMEOUT_S)
        [completion] = medium.poll()
        return completion.failure is not None and completion.failure.reason is FailureReason.MISSING

    assert eventually(is_answered)
    assert server.calls.count("retrieve") + server.calls.count("lookup") > before
    medium.close()
