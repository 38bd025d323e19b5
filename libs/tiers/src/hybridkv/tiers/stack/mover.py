"""The moving half of a stack, one for each rank: hands a stack's moves to the slower media and checks what comes back.

A promoted chunk is verified by the slow medium and sealed with the checksum that was verified, so what the fast tier
later checks is what was stored at first. A cascaded one must have the checksum that it was sealed with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from hybridkv.tiers.contract import Completion, Failure, FailureReason, GathersMoves, SealedMemory, Ticket, TierMedium
from hybridkv.tiers.errors import is_shortage
from hybridkv.tiers.stack.moves import Direction, TierMove

logger = logging.getLogger(__name__)


class TierMover:
    """Carries out moves between an arena and slower media. Decides nothing and raises nothing for what a medium meets.

    Args:
        arena: this rank's part of the fast tier.
        media: this rank's parts of the slower tiers, by name. One may be added before the first move that names it.
        clock: seconds.
    """

    def __init__(self, arena: SealedMemory, media: dict[str, TierMedium], clock: Callable[[], float]) -> None:
        self._arena = arena
        self.media = media
        self._clock = clock
        self._moves: dict[Ticket, tuple[TierMove, float]] = {}
        self._broken: set[str] = set()
        """Tiers whose medium has raised."""
        self._ended: list[tuple[TierMove, Failure | None, float]] = []

    def start(self, moves: Iterable[TierMove]) -> None:
        """Submit moves. A problem is an outcome, not an exception."""
        for move in moves:
            ticket = Ticket(move.move_id)
            started_s = self._clock()
            try:
                views = self._arena.views(move.near)
                if move.direction is Direction.PROMOTE:
                    self._arena.discard(move.near)
            except Exception as error:  # a plan that does not fit must not stop the engine
                reason = FailureReason.BUSY if is_shortage(error) else FailureReason.IO
                self._ended.append((move, Failure(reason, f"{type(error).__name__}: {error}"), 0.0))
                continue
            self._moves[ticket] = (move, started_s)
            medium = self.media[move.tier]
            try:
                if move.direction is Direction.PROMOTE:
                    medium.load(ticket, move.key, move.far, views)
                else:
                    medium.store(ticket, move.key, move.far, views)
            except Exception as error:  # it may have begun all the same: the move ends with its completion, or late
                self._complain(move.tier, error)
        for tier, medium in self.media.items():
            if isinstance(medium, GathersMoves):
                try:
                    medium.flush()
                except Exception as error:
                    self._complain(tier, error)

    def _complain(self, tier: str, error: Exception) -> None:
        """A medium broke its contract. Said once each: it may go on so in every step."""
        if tier not in self._broken:
            self._broken.add(tier)
            logger.error("the %s tier raised what it should report: %s: %s", tier, type(error).__name__, error)

    def poll(self) -> list[tuple[TierMove, Failure | None, float]]:
        """Moves that ended since the last call, each with its failure and the seconds that it took."""
        for tier, medium in self.media.items():
            try:
                completions = medium.poll()
            except Exception as error:  # its moves are late from now on, and those of other tiers are not
                self._complain(tier, error)
                continue
            for completion in completions:
                started = self._moves.pop(completion.ticket, None)
                if started is None:
                    continue  # it has ended before
                move, started_s = started
                self._ended.append((move, self._verify(move, completion), self._clock() - started_s))
        ended, self._ended = self._ended, []
        return ended

    def _verify(self, move: TierMove, completion: Completion) -> Failure | None:
        if completion.failure is not None:
            return completion.failure
        if move.direction is Direction.PROMOTE:
            checksums = None if completion.checksum is None else [completion.checksum]
            [failure] = self._arena.seal_all([(move.key, move.near)], checksums)
            return failure
        sealed = self._arena.sealed_checksum(move.key, move.near)
        if sealed is None:
            return Failure(FailureReason.MISSING, f"{move.key.hex()} was not sealed when it cascaded")
        if completion.checksum is not None and sealed != completion.checksum:
            return Failure(FailureReason.CHECKSUM, f"the bytes of {move.key.hex()} changed in the fast tier")
        return None

    def close(self, timeout_s: float) -> bool:
        """Wait for what is on its way, at most `timeout_s`, then give up the media. False when it was not enough.

        The arena is closed by its owner, afterwards.
        """
        ends_s = self._clock() + timeout_s
        is_drained = True
        for tier, medium in self.media.items():
            try:
                is_drained &= medium.drain(max(ends_s - self._clock(), 0.0))
                medium.close()
            except Exception as error:  # the others are still to be closed
                self._complain(tier, error)
                is_drained = False
        return is_drained
