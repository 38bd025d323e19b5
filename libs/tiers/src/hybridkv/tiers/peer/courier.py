"""What an index of peers needs of whoever carries its questions. Values, and a protocol; nothing here is sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hybridkv.tiers.contract import Key, Slot


class Answered(NamedTuple):
    """One peer's answer to one question."""

    peer: int
    request: int
    slots: tuple[Slot | None, ...]
    """Where each key lies in the peer's memory, in the order of the question; None where it does not."""
    lease_s: float
    """For so long it stays there."""
    heard_s: float
    """When it arrived, by the index's clock."""


class Lost(NamedTuple):
    """A peer that was ready is not any more: what it was asked is not answered, and nothing stays for this side."""

    peer: int
    heard_s: float


class Courier(Protocol):
    """Takes questions to peers and brings answers. No call waits; answers come from another thread into `news`."""

    @property
    def news(self) -> deque[Answered | Lost]:
        """What arrived, in order. The index takes it from the left."""
        ...

    def ready(self) -> Sequence[int]:
        """Peers that may be asked now."""
        ...

    def ask(self, peer: int, request: int, keys: Sequence[Key]) -> bool:
        """Ask which of these a peer holds. False: it cannot be asked, and there will be no answer."""
        ...

    def give_up(self, peer: int, keys: Sequence[Key]) -> None:
        """These need not stay for this side."""
        ...

    def close(self) -> None:
        """End every connection, within a bounded time. Repeatable."""
        ...
