"""Description of the tier under test, and steps that the suites share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.tiers.contract import Completion, Failure, Key, Slot, Ticket, TierIndex, TierMedium
from hybridkv.tiers.errors import TierProtocolError

CHUNK_BYTES = 4096
"""Size of the suites' usual chunk; a tier that rounds must round to a divisor of it."""

TIMEOUT_S = 30.0
"""Only a broken tier waits that long."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Index and medium of one tier."""

    index: TierIndex
    medium: TierMedium


class TierSuite:
    """Base of the suites."""

    chunk_cost_bytes: int = CHUNK_BYTES
    """Bytes that one usual chunk uses in the tier, with everything stored beside the content."""

    def make_tier(self, capacity_bytes: int) -> Tier:
        """A new, empty tier of exactly this capacity, a multiple of `chunk_cost_bytes`."""
        raise NotImplementedError

    def corrupt(self, medium: TierMedium, slot: Slot) -> None:
        """Changes one stored byte of the slot without the medium's knowledge."""
        raise NotImplementedError

    def make_tier_of(self, num_chunks: int) -> Tier:
        """A tier with room for exactly so many usual chunks."""
        return self.make_tier(num_chunks * self.chunk_cost_bytes)

    def make_index(self, num_chunks: int) -> TierIndex:
        return self.make_tier_of(num_chunks).index

    def bytes_of(self, num_chunks: int) -> int:
        """Size of the largest chunk that uses no more than so many usual ones."""
        return num_chunks * self.chunk_cost_bytes - (self.chunk_cost_bytes - CHUNK_BYTES)


def reserved(index: TierIndex, key: Key, num_bytes: int = CHUNK_BYTES) -> Slot:
    """Reserves a key; must not be refused."""
    slot = index.reserve(key, num_bytes)
    assert isinstance(slot, Slot), f"{key!r} was refused: {slot}"
    return slot


def committed(index: TierIndex, *keys: Key) -> None:
    """Reserves and commits one chunk for each key."""
    for key in keys:
        reserved(index, key)
        assert index.commit(key)


def finish(medium: TierMedium) -> list[Completion]:
    """All remaining completions."""
    assert medium.drain(TIMEOUT_S)
    return medium.poll()


def failure_of(medium: TierMedium, ticket: Ticket) -> Failure | None:
    """Completes everything; exactly this operation must have been in flight."""
    completions = finish(medium)
    assert [completion.ticket for completion in completions] == [ticket]
    return completions[0].failure


def is_protocol_error(call: Callable[[], object]) -> bool:
    """Whether the call raises `TierProtocolError`."""
    try:
        call()
    except TierProtocolError:
        return True
    return False
