"""What a rank's moves do where no page comes back: a real server answers all that it understands, so it is played."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.lmcache.detection import ServerFacts
from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.member import CacheMember
from hybridkv.tiers import Completion, FailureReason, Ticket
from hybridkv.tiers.lmcache.moving import Moving, RankMove
from hybridkv.tiers.lmcache.records import groups_of

SIZE = 8


class PlayedShelf:
    """A size, of which all pages are taken.

    Args:
        is_reached: whether the server is there.
    """

    def __init__(self, *, is_reached: bool = True) -> None:
        self.ready: object | None = object() if is_reached else None
        self.is_new = not is_reached
        self.connection = self
        self.num_doubts = 0

    @property
    def state(self) -> str:
        return "as a test has it"

    def doubt(self) -> None:
        self.num_doubts += 1

    def take(self, *, is_store: bool) -> object | None:
        return None

    def give_back(self, page: object) -> None:
        pass

    def prefix(self, key: bytes, ready: object) -> object:
        raise AssertionError("there is no page to carry it")


class BrokenShelf(PlayedShelf):
    """One that has a page, and cannot say how a server calls a chunk."""

    def take(self, *, is_store: bool) -> object | None:
        return object()

    def prefix(self, key: bytes, ready: object) -> object:
        raise ValueError("a chunk of too few words")


class World:
    """Moves of one size, and how they ended."""

    def __init__(self, shelf: PlayedShelf) -> None:
        self.now_s = 0.0
        self.shelf = shelf
        self.ended: list[Completion] = []
        shelves: Any = {SIZE: shelf}
        self.moving = Moving(shelves, 0, 5.0, lambda: self.now_s, lambda action: action(), self.ended.append)

    def begin(self, timeout_s: float) -> None:
        now_s = self.now_s
        self.moving.begin(
            RankMove(Ticket(1), b"key", [memoryview(bytearray(SIZE))], False, now_s, now_s + timeout_s), SIZE
        )

    def reasons(self) -> list[FailureReason | None]:
        return [each.failure and each.failure.reason for each in self.ended]


def test_a_server_that_gives_no_page_back_is_asked_by_another_connection() -> None:
    world = World(PlayedShelf())
    world.now_s = 1.0
    world.begin(30.0)
    world.now_s = 30.9
    world.moving.step()
    assert world.ended == [] and world.moving.is_busy
    world.now_s = 31.0
    world.moving.step()
    assert world.reasons() == [FailureReason.BUSY]
    assert world.shelf.num_doubts == 1 and not world.moving.is_busy


def test_a_server_that_is_merely_slow_keeps_its_connection() -> None:
    world = World(PlayedShelf())
    world.now_s = 1.0
    world.begin(30.0)
    world.now_s = 20.0
    [row] = world.moving._rows.values()
    page: Any = object()
    world.moving._give_back(row, page)
    world.now_s = 31.0
    world.moving.step()
    assert world.reasons() == [FailureReason.BUSY]
    assert world.shelf.num_doubts == 0


def test_a_server_that_does_not_come_in_time_is_no_lack_of_pages() -> None:
    world = World(PlayedShelf(is_reached=False))
    world.begin(1.0)
    assert world.ended == [], "it may come yet"
    world.now_s = 5.0  # both waits are over: the move's, and that for a server
    world.moving.step()
    assert world.reasons() == [FailureReason.IO]
    assert world.shelf.num_doubts == 0, "a connection that is only being made"


def test_a_bug_over_one_move_costs_that_move() -> None:
    world = World(BrokenShelf())
    world.begin(30.0)
    assert world.reasons() == [FailureReason.IO]
    assert not world.moving.is_busy


def test_a_server_whose_chunk_has_too_few_words_for_a_key_is_refused() -> None:
    facts = ServerFacts("0.5.6", "one", 4, False, 0, False, "zmq", "blake3")
    member = CacheMember(groups_of(SIZE), b"whose", 1, 1)
    with pytest.raises(LMCacheConfigurationError, match="at least 8 tokens"):
        member.joining(facts, 4)
    try:
        assert member.joining(facts, 8) is not None
    finally:
        member.close()
