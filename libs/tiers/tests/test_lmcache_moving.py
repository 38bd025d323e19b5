"""What a rank's moves do where no page comes back: a real server answers all that it understands, so it is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hybridkv.tiers import Completion, FailureReason, Ticket
from hybridkv.tiers.lmcache.moving import Move, Moving


class World:
    """One shelf of which every page is taken."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_doubts = 0
        self.ended: list[Completion] = []
        shelf: Any = SimpleNamespace(
            ready=object(),
            connection=SimpleNamespace(doubt=self._doubt),
            take=lambda *, is_store: None,
            give_back=lambda page: None,
        )
        self.moving = Moving({8: shelf}, 0, 5.0, lambda: self.now_s, lambda action: action(), self.ended.append)

    def _doubt(self) -> None:
        self.num_doubts += 1

    def begin(self, timeout_s: float) -> None:
        now_s = self.now_s
        self.moving.begin(Move(Ticket(1), b"key", [memoryview(bytearray(8))], False, now_s, now_s + timeout_s), 8)


def test_a_server_that_gives_no_page_back_is_asked_by_another_connection() -> None:
    world = World()
    world.now_s = 1.0
    world.begin(30.0)
    world.now_s = 30.9
    world.moving.step()
    assert world.ended == [] and world.moving.is_busy
    world.now_s = 31.0
    world.moving.step()
    assert [each.failure and each.failure.reason for each in world.ended] == [FailureReason.BUSY]
    assert world.num_doubts == 1 and not world.moving.is_busy


def test_a_server_that_is_merely_slow_keeps_its_connection() -> None:
    world = World()
    world.now_s = 1.0
    world.begin(30.0)
    world.now_s = 20.0
    [row] = world.moving._rows.values()
    world.moving._give_back(row, SimpleNamespace())  # type: ignore[arg-type]
    world.now_s = 31.0
    world.moving.step()
    assert [each.failure and each.failure.reason for each in world.ended] == [FailureReason.BUSY]
    assert world.num_doubts == 0


def test_a_bug_over_one_move_costs_that_move() -> None:
    world = World()
    world.moving._rows[8].shelf.take = lambda *, is_store: SimpleNamespace()  # type: ignore[method-assign, misc, assignment, return-value]
    world.moving._rows[8].shelf.prefix = lambda key, ready: None  # type: ignore[method-assign, misc, assignment, return-value]
    world.begin(30.0)
    [completion] = world.ended
    assert completion.failure is not None and completion.failure.reason is FailureReason.IO
    assert not world.moving.is_busy
