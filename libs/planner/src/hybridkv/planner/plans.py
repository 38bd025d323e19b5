"""Which blocks of which groups move: frozen values that can be printed, compared and replayed."""

from collections.abc import Callable, Sequence

import msgspec

from hybridkv.planner.coverage import chunk_blocks, needed_ends, resume_start
from hybridkv.planner.groups import CacheSpec, GroupKind


class PlanError(ValueError):
    """The engine's blocks do not fit what the plan needs; nothing may be moved."""


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one group that hold (a part of) one chunk.

    Args:
        group_index: the group.
        end_token: the chunk's end.
        first_block: where `block_ids` begin within the chunk's stored blocks (`chunk_blocks`).
        block_ids: engine blocks, in token order.
    """

    group_index: int
    end_token: int
    first_block: int
    block_ids: tuple[int, ...]


class State(msgspec.Struct, frozen=True, array_like=True):
    """A recurrent state that the engine hands over: the block that holds it, and the tokens that it stands for."""

    group_index: int
    block_id: int
    num_tokens: int


class StorePlan(msgspec.Struct, frozen=True):
    """What becomes storable. `unaligned_states` counts states that lie on no chunk boundary and are left out."""

    transfers: tuple[Transfer, ...]
    unaligned_states: int = 0


def plan_load(
    spec: CacheSpec, num_tokens: int, computed_tokens: int, block_ids: Sequence[Sequence[int]], null_block: int = 0
) -> tuple[Transfer, ...]:
    """What must be written into the engine's blocks so that the request resumes at `num_tokens`.

    Args:
        spec: the model's groups.
        num_tokens: the boundary that `longest_hit` answered.
        computed_tokens: the prefix that the engine holds itself; a multiple of every stored group's block.
        block_ids: for every group of `spec`, the request's block table.
        null_block: the id that stands for "no block" in a table.

    Raises:
        PlanError: a block that is needed is not there, or one that was allocated would stay unwritten.
    """
    transfers: list[Transfer] = []
    for group_index in spec.stored_groups:
        group, table = spec.groups[group_index], block_ids[group_index]
        start = resume_start(group, num_tokens)
        if group.kind is not GroupKind.RECURRENT:
            start = max(start, computed_tokens)
        first_needed = start // group.block_tokens
        for end_token in needed_ends(spec, group_index, num_tokens, computed_tokens):
            stored = chunk_blocks(spec, group_index, end_token)
            wanted = range(max(stored.start, first_needed), stored.stop)
            ids = tuple(table[wanted.start : wanted.stop])
            if len(ids) != len(wanted) or null_block in ids:
                raise PlanError(
                    f"group {group_index} ({group.kind.name}) needs blocks {wanted.start} to {wanted.stop - 1} of its "
                    f"table to resume at {num_tokens}, got {list(ids)}"
                )
            transfers.append(Transfer(group_index, end_token, wanted.start - stored.start, ids))
        unwritten = table[computed_tokens // group.block_tokens : first_needed]
        if any(block_id != null_block for block_id in unwritten):
            raise PlanError(
                f"group {group_index} ({group.kind.name}) has blocks before {first_needed} that a load to {num_tokens} "
                f"would leave unwritten: {list(unwritten)}"
            )
    return tuple(transfers)


def plan_store(
    spec: CacheSpec,
    first_token: int,
    num_tokens: int,
    block_ids: Sequence[Sequence[int]],
    states: Sequence[State],
    wanted: Callable[[int, int], bool],
    null_block: int = 0,
) -> StorePlan:
    """What of [first_token, num_tokens) can be stored for a request, now that `num_tokens` of it are computed.

    Blocks that the engine has given up already (out of a window) leave their chunk out. A RECURRENT group is stored
    from `states` alone, never by position in its table: tables of running states move.

    Args:
        spec: the model's groups.
        first_token: chunks that end at or before this have been seen to; a multiple of the chunk.
        num_tokens: tokens whose content is final.
        block_ids: for every group of `spec`, the request's block table.
        states: what the engine hands over this step for this request.
        wanted: `wanted(group_index, end_token)`: False for chunks that are stored already.
        null_block: the id that stands for "no block" in a table.
    """
    transfers: list[Transfer] = []
    for group_index in spec.stored_groups:
        group = spec.groups[group_index]
        if group.kind is GroupKind.RECURRENT:
            continue
        last = num_tokens - group.lookahead_tokens
        for end_token in range(first_token + spec.chunk_tokens, last + 1, spec.chunk_tokens):
            stored = chunk_blocks(spec, group_index, end_token)
            ids = tuple(block_ids[group_index][stored.start : stored.stop])
            if stored and len(ids) == len(stored) and null_block not in ids and wanted(group_index, end_token):
                transfers.append(Transfer(group_index, end_token, 0, ids))
    unaligned = 0
    for state in states:
        if state.num_tokens % spec.chunk_tokens or state.block_id == null_block:
            unaligned += 1
        elif wanted(state.group_index, state.num_tokens):
            transfers.append(Transfer(state.group_index, state.num_tokens, 0, (state.block_id,)))
    return StorePlan(tuple(transfers), unaligned)
