"""Worker half of a stack, one for each rank: submits moves to the secondary media, and verifies their results.

The secondary medium verifies a promoted chunk. The arena seals the chunk with the checksum from the medium, so later
checks compare with the bytes that were stored first. The checksum of a cascaded chunk must equal the one in its seal.
If the medium returns no checksum, the arena computes the seal, and a cascaded chunk is not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from hybridkv.tiers.contract import BatchedMedium, Completion, Failure, FailureReason, SealedMemory, Ticket, TierMedium
from hybridkv.tiers.errors import is_shortage
from hybridkv.tiers.stack.moves import Direction, TierMove

logger = logging.getLogger(__name__)


class TierMover:
    """Runs moves between an arena and secondary media. Makes no decisions.

    Args:
        arena: this rank's part of the primary tier.
        media: this rank's parts of the secondary tiers, by name. Add a medium before the first move of its tier.
        clock: seconds.
    """

    def __init__(self, arena: SealedMemory, media: dict[str, TierMedium], clock: Callable[[], float]) -> None:
        self._arena = arena
        self.media = media
        self._clock = clock
        self._moves: dict[Ticket, tuple[TierMove, float]] = {}
        self._broken: set[str] = set()
        """Names of tiers with a medium that has raised an exception."""
        self._ended: list[tuple[TierMove, Failure | None, float]] = []

    def start(self, moves: Iterable[TierMove]) -> None:
        """Submit moves. `poll` returns errors as failures. If a medium raises an exception, the exception is logged,
        and the move ends with its completion or times out."""
        for move in moves:
            ticket = Ticket(move.move_id)
            started_s = self._clock()
            try:
                views = self._arena.views(move.primary)
                if move.direction is Direction.PROMOTE:
                    self._arena.discard(move.primary)
            except Exception as error:  # a wrong slot must not stop the engine
                reason = FailureReason.BUSY if is_shortage(error) else FailureReason.IO
                self._ended.append((move, Failure(reason, f"{type(error).__name__}: {error}"), 0.0))
                continue
            self._moves[ticket] = (move, started_s)
            medium = self.media[move.tier]
            try:
                if move.direction is Direction.PROMOTE:
                    medium.load(ticket, move.key, move.secondary, views)
                else:
                    medium.store(ticket, move.key, move.secondary, views)
            except Exception as error:  # the operation may run: the move ends with its completion, or times out
                self._log_once(move.tier, error)
        for tier, medium in self.media.items():
            if isinstance(medium, BatchedMedium):
                try:
                    medium.flush()
                except Exception as error:
                    self._log_once(tier, error)

    def _log_once(self, tier: str, error: Exception) -> None:
        """Log that a medium raised an exception. Once per tier, because the medium may raise in every step."""
        if tier not in self._broken:
            self._broken.add(tier)
            logger.error(
                "the medium of tier %s raised an exception that it should return as a failure: %s: %s",
                tier,
                type(error).__name__,
                error,
            )

    def poll(self) -> list[tuple[TierMove, Failure | None, float]]:
        """Moves that ended since the last call, each with its failure and its duration in seconds."""
        for tier, medium in self.media.items():
            try:
                completions = medium.poll()
            except Exception as error:  # the moves of this tier time out; other tiers are not affected
                self._log_once(tier, error)
                continue
            for completion in completions:
                started = self._moves.pop(completion.ticket, None)
                if started is None:
                    continue  # ended already
                move, started_s = started
                self._ended.append((move, self._verify(move, completion), self._clock() - started_s))
        ended, self._ended = self._ended, []
        return ended

    def _verify(self, move: TierMove, completion: Completion) -> Failure | None:
        if completion.failure is not None:
            return completion.failure
        if move.direction is Direction.PROMOTE:
            checksums = None if completion.checksum is None else [completion.checksum]
            [failure] = self._arena.seal_all([(move.key, move.primary)], checksums)
            return failure
        sealed = self._arena.sealed_checksum(move.key, move.primary)
        if sealed is None:
            return Failure(FailureReason.MISSING, f"{move.key.hex()} is not sealed in the primary tier")
        if completion.checksum is not None and sealed != completion.checksum:
            return Failure(FailureReason.CHECKSUM, f"the bytes of {move.key.hex()} changed in the primary tier")
        return None

    def close(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for moves in flight, then close the media. False on a timeout or an error.

        The owner of the arena closes it afterwards.
        """
        ends_s = self._clock() + timeout_s
        is_drained = True
        for tier, medium in self.media.items():
            try:
                try:
                    is_drained &= medium.drain(max(ends_s - self._clock(), 0.0))
                finally:
                    medium.close()
            except Exception as error:  # the other media must be closed too
                self._log_once(tier, error)
                is_drained = False
        return is_drained
