"""Values of plans: frozen, so that they can be printed, compared and replayed.

`find_local_copies` finds the transfers of a load that can be copied from the engine's own blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeAlias

import msgspec

from hybridkv.planner.coverage import chunk_blocks
from hybridkv.planner.groups import CacheSpec, GroupKind


class PlanError(ValueError):
    """Arguments do not fit the cache, or block tables do not fit the plan. Nothing may be moved."""


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one group that hold one chunk, a part of one, or a tail.

    The first and the last block may also hold tokens of other chunks. The transfer does not move these (`chunk_span`).

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
        num_transfers: number of transfers. If more than one, all are whole chunks.
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
        """The transfers as runs of one transfer each."""
        return [
            TransferRun(each.group_index, each.end_token, 1, each.first_block, each.block_ids)
            for each in self.transfers(chunk_tokens)
        ]


def transfers_of(runs: Iterable[TransferRun], chunk_tokens: int) -> tuple[Transfer, ...]:
    """All transfers of the runs, in order."""
    return tuple(chain.from_iterable(run.transfers(chunk_tokens) for run in runs))


Wanted: TypeAlias = Callable[[int, Sequence[int]], Sequence[int]]
"""`wanted(group_index, ends)`: the ends, ascending, of the chunks or tails to store. Returns `ends` itself if all
are to be stored."""


class State(msgspec.Struct, frozen=True, array_like=True):
    """A recurrent state that the engine hands over: its block, and the number of tokens before it."""

    group_index: int
    block_id: int
    num_tokens: int


class StorePlan(msgspec.Struct, frozen=True):
    """Transfers to store.

    Args:
        runs: the transfers.
        unaligned_states: number of states left out because they lie on no boundary or have no block.
        incomplete_tails: number of tails left out because a group's part is missing or not final: no hit could use
            them.
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


class LocalCopies(msgspec.Struct, frozen=True):
    """Transfers that are copied from the engine's own blocks.

    Args:
        block_ids: for each transfer, the engine's blocks with the same content, in the transfer's order; empty if the
            transfer is read from the tier.
        num_tokens: tokens after the engine's own prefix, of the chunks that read nothing or only states from the tier.
    """

    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int


def find_local_copies(
    spec: CacheSpec, transfers: Sequence[Transfer], computed_tokens: int, held: Callable[[int, int], int | None]
) -> LocalCopies:
    """Finds the transfers of a load that can be copied from the engine's own blocks.

    An engine resumes at its last state, even if it holds attention blocks after it. These blocks are copied. Not
    copied: states, because the engine may still write to their blocks; blocks of a drafter, because their last token
    depends on the next token, which is not part of the block's hash; parts of blocks; tails. A transfer is copied whole
    or not at all.

    Args:
        spec: the model's groups.
        transfers: transfers of a load, from `plan_load`.
        computed_tokens: the prefix that the engine holds itself.
        held: `held(group_index, index)` returns the engine's block that has the content of this index of the block
            table; None without one. For a FULL group, not called after the first missing block.
    """
    left = {index for index in {transfer.group_index for transfer in transfers} if _may_copy(spec, index)}
    found: list[tuple[int, ...]] = []
    for transfer in transfers:
        index = transfer.group_index
        ids: tuple[int, ...] = ()
        if index in left:
            ids = _held(spec, transfer, held) if transfer.end_token % spec.chunk_tokens == 0 else ()
            if not ids and spec.groups[index].kind is GroupKind.FULL:
                left.remove(index)
        found.append(ids)
    if not any(found):
        return LocalCopies(tuple(found), 0)
    tokens: dict[int, bool] = {}
    for transfer, ids in zip(transfers, found, strict=True):
        if spec.groups[transfer.group_index].kind is not GroupKind.RECURRENT:
            tokens[transfer.end_token] = tokens.get(transfer.end_token, True) and bool(ids)
    whole = (end - max(computed_tokens, end - spec.chunk_tokens) for end, is_local in tokens.items() if is_local)
    return LocalCopies(tuple(found), sum(whole))


def has_local_copies(spec: CacheSpec, runs: Iterable[TransferRun], held: Callable[[int, int], int | None]) -> bool:
    """False only if `find_local_copies` finds no transfer of these runs. Cheap in this case, the usual one.

    Args:
        spec: the model's groups.
        runs: runs of a load, from `plan_load_runs`.
        held: as for `find_local_copies`.
    """
    gone: set[int] = set()
    for run in runs:
        index, group = run.group_index, spec.groups[run.group_index]
        if index in gone or not _may_copy(spec, index):
            continue
        first = chunk_blocks(spec, index, run.end_token).start + run.first_block
        step = spec.chunk_tokens // group.block_tokens
        is_full = group.kind is GroupKind.FULL
        if any(held(index, first + number * step) is not None for number in range(1 if is_full else run.num_transfers)):
            return True
        if is_full:
            gone.add(index)
    return False


def _may_copy(spec: CacheSpec, group_index: int) -> bool:
    group = spec.groups[group_index]
    return (
        group.kind not in (GroupKind.RECURRENT, GroupKind.SCRATCH)
        and group.lookahead_tokens == 0
        and group_index not in spec.cut_groups
    )


def _held(spec: CacheSpec, transfer: Transfer, held: Callable[[int, int], int | None]) -> tuple[int, ...]:
    first = chunk_blocks(spec, transfer.group_index, transfer.end_token).start + transfer.first_block
    ids = []
    for place in range(first, first + len(transfer.block_ids)):
        block_id = held(transfer.group_index, place)
        if block_id is None:
            return ()
        ids.append(block_id)
    return tuple(ids)
