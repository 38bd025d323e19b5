"""Values that plans consist of: frozen, so that they can be printed, compared and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeAlias

import msgspec

from hybridkv.planner.groups import CacheSpec


class PlanError(ValueError):
    """Arguments do not fit the cache, or block tables lack blocks of the plan. Nothing may be moved."""


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one group that hold one chunk, a part of one, or a tail.

    The first and the last block may hold tokens of other chunks too, which the transfer leaves out (`chunk_span`).

    Args:
        group_index: the group.
        end_token: end of the chunk or tail.
        first_block: position of `block_ids` within the chunk's stored blocks (`chunk_blocks`).
        block_ids: engine blocks, in token order.
    """

    group_index: int
    end_token: int
    first_block: int
    block_ids: tuple[int, ...]


class TransferRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive transfers of one group, one chunk apart, each with the same number of blocks.

    Args:
        group_index: the group.
        end_token: end of the first transfer.
        num_transfers: number of transfers. More than one are whole chunks.
        first_block: the same as in each `Transfer`.
        block_ids: blocks of all transfers, in order.
    """

    group_index: int
    end_token: int
    num_transfers: int
    first_block: int
    block_ids: tuple[int, ...]

    def end_tokens(self, chunk_tokens: int) -> range:
        """End of each transfer."""
        return range(self.end_token, self.end_token + self.num_transfers * chunk_tokens, chunk_tokens)

    def transfers(self, chunk_tokens: int) -> list[Transfer]:
        """The transfers."""
        group, first_block, ids = self.group_index, self.first_block, self.block_ids
        step = len(ids) // self.num_transfers
        return [
            Transfer(group, end_token, first_block, ids[number * step : (number + 1) * step])
            for number, end_token in enumerate(self.end_tokens(chunk_tokens))
        ]

    def single(self, chunk_tokens: int) -> list[TransferRun]:
        """The transfers as runs of one."""
        return [
            TransferRun(each.group_index, each.end_token, 1, each.first_block, each.block_ids)
            for each in self.transfers(chunk_tokens)
        ]


def transfers_of(runs: Iterable[TransferRun], chunk_tokens: int) -> tuple[Transfer, ...]:
    """All transfers of the runs, in order."""
    return tuple(chain.from_iterable(run.transfers(chunk_tokens) for run in runs))


Wanted: TypeAlias = Callable[[int, Sequence[int]], Sequence[int]]
"""`wanted(group_index, ends)`: the ends, ascending, of the chunks or tails to store. If that is all of them, the same
object."""


class State(msgspec.Struct, frozen=True, array_like=True):
    """A recurrent state that the engine hands over: the block that holds it, and the tokens that it stands for."""

    group_index: int
    block_id: int
    num_tokens: int


class StorePlan(msgspec.Struct, frozen=True):
    """Transfers to store.

    Args:
        runs: the transfers.
        unaligned_states: number of states left out because they lie on no boundary.
        incomplete_tails: number of tails left out because a group lacks its part: no hit could use them.
    """

    runs: tuple[TransferRun, ...]
    unaligned_states: int = 0
    incomplete_tails: int = 0

    def transfers(self, chunk_tokens: int) -> tuple[Transfer, ...]:
        """The transfers, one for each chunk."""
        return transfers_of(self.runs, chunk_tokens)


def table_of(spec: CacheSpec, block_ids: Sequence[Sequence[int]], group_index: int) -> Sequence[int]:
    """Block table of a group.

    Raises:
        PlanError: the group has no table.
    """
    if group_index >= len(block_ids):
        raise PlanError(f"block_ids must have a table for each of {len(spec.groups)} groups, got {len(block_ids)}")
    return block_ids[group_index]
