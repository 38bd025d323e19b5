"""What a medium hands its operations to."""

from __future__ import annotations

from typing import Protocol

from hybridkv.tiers.contract import Completion, Failure, FailureReason
from hybridkv.tiers.disk.medium.operations import Operation

CLOSED = Failure(FailureReason.CLOSED, "the medium was closed")
NO_THREAD = Failure(FailureReason.BUSY, "no thread could be started")


class Runner(Protocol):
    """Carries out operations that were looked over. Only `wait_until_idle` and `close` take time."""

    def submit(self, operation: Operation) -> Failure | None:
        """Why it was not taken, None if it was."""

    def take(self) -> list[Completion]:
        """How operations ended, each once."""

    def wait_until_idle(self, timeout_s: float) -> bool:
        """False when one of them has not ended by then."""

    def close(self) -> None:
        """Fail what was not begun with CLOSED; wait for the rest, and sync, for no longer than the options say."""


def busy(num_waiting: int) -> Failure:
    return Failure(FailureReason.BUSY, f"{num_waiting} operations wait already")
