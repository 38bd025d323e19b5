"""What plans are made of: frozen values that can be printed, compared and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeAlias

import msgspec

from hybridkv.planner.groups import CacheSpec


class PlanError(ValueError):
    """What was given does not fit the cache, or the engine's blocks what the plan needs; nothing may be moved."""


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one group that hold (a part of) one chunk, or of the tail of one.

    Of the first and the last block only what belongs to the chunk is meant (`chunk_span`).

    Args:
        group_index: the group.
        end_token: the chunk's end, or the tail's.
        first_block: where `block_ids` begin within the chunk's stored blocks (`chunk_blocks`).
        block_ids: engine blocks, in token order.
    """

    group_index: int
    end_token: int
    first_block: int
    block_ids: tuple[int, ...]


class TransferRun(msgspec.Struct, frozen=True, array_like=True):
    """Transfers of one group that follow each other, a chunk apart and with as many blocks each.

    Args:
        group_index: the group.
        end_token: of the first of them.
        num_transfers: how many there are. More than one are of whole chunks.
        first_block: of each, as of `Transfer`.
        block_ids: of all of them, one behind the other.
    """

    group_index: int
    end_token: int
    num_transfers: int
    first_block: int
    block_ids: tuple[int, ...]

    def end_tokens(self, chunk_tokens: int) -> range:
        """Where each ends."""
        return range(self.end_token, self.end_token + self.num_transfers * chunk_tokens, chunk_tokens)

    def transfers(self, chunk_tokens: int) -> list[Transfer]:
        """Each by itself."""
        group, first_block, ids = self.group_index, self.first_block, self.block_ids
        step = len(ids) // self.num_transfers
        return [
            Transfer(group, end_token, first_block, ids[number * step : (number + 1) * step])
            for number, end_token in enumerate(self.end_tokens(chunk_tokens))
        ]

    def single(self, chunk_tokens: int) -> list[TransferRun]:
        """Each as a run of one."""
        return [
            TransferRun(each.group_index, each.end_token, 1, each.first_block, each.block_ids)
            for each in self.transfers(chunk_tokens)
        ]


def transfers_of(runs: Iterable[TransferRun], chunk_tokens: int) -> tuple[Transfer, ...]:
    """Each transfer of runs by itself, in order."""
    return tuple(chain.from_iterable(run.transfers(chunk_tokens) for run in runs))


Wanted: TypeAlias = Callable[[int, Sequence[int]], Sequence[int]]
"""Of a group's chunks or tails that end at these tokens, ascending, those that are to be stored: the same object where
that is all of them."""


class State(msgspec.Struct, frozen=True, array_like=True):
    """A recurrent state that the engine hands over: the block that holds it, and the tokens that it stands for."""

    group_index: int
    block_id: int
    num_tokens: int


class StorePlan(msgspec.Struct, frozen=True):
    """What becomes storable.

    Args:
        runs: what to store.
        unaligned_states: states that lie on no boundary and are left out.
        early_states: states whose content is not final yet, left out too.
        incomplete_tails: tails that are left out because some group cannot give its part: no hit could use them.
    """

    runs: tuple[TransferRun, ...]
    unaligned_states: int = 0
    incomplete_tails: int = 0
    early_states: int = 0

    def transfers(self, chunk_tokens: int) -> tuple[Transfer, ...]:
        """What to store, each chunk by itself."""
        return transfers_of(self.runs, chunk_tokens)


def table_of(spec: CacheSpec, block_ids: Sequence[Sequence[int]], group_index: int) -> Sequence[int]:
    """A group's block table.

    Raises:
        PlanError: there is none.
    """
    if group_index >= len(block_ids):
        raise PlanError(f"block_ids must have a table for each of {len(spec.groups)} groups, got {len(block_ids)}")
    return block_ids[group_index]
