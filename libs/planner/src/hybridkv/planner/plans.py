"""Which blocks of which groups move: frozen values that can be printed, compared and replayed."""

from collections.abc import Callable, Sequence

import msgspec

from hybridkv.planner.coverage import chunk_blocks, load_start, needed_ends
from hybridkv.planner.groups import CacheSpec, GroupKind


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


class State(msgspec.Struct, frozen=True, array_like=True):
    """A recurrent state that the engine hands over: the block that holds it, and the tokens that it stands for."""

    group_index: int
    block_id: int
    num_tokens: int


class StorePlan(msgspec.Struct, frozen=True):
    """What becomes storable.

    Args:
        transfers: what to store.
        unaligned_states: states that lie on no boundary and are left out.
        early_states: states whose content is not final yet, left out too.
        incomplete_tails: tails that are left out because some group cannot give its part: no hit could use them.
    """

    transfers: tuple[Transfer, ...]
    unaligned_states: int = 0
    incomplete_tails: int = 0
    early_states: int = 0


def plan_load(
    spec: CacheSpec, num_tokens: int, computed_tokens: int, block_ids: Sequence[Sequence[int]], null_block: int = 0
) -> tuple[Transfer, ...]:
    """What must be written into the engine's blocks so that the request resumes at `num_tokens`.

    Args:
        spec: the model's groups.
        num_tokens: the boundary that `longest_hit` answered: a multiple of `spec.boundary_tokens`.
        computed_tokens: the prefix that the engine holds itself; a multiple of every stored group's block.
        block_ids: for every group of `spec`, the request's block table.
        null_block: the id that stands for "no block" in a table.

    Raises:
        PlanError: nothing can be stored for such a boundary, a group has no table, a block that is needed is not
            there, or one that was allocated would stay unwritten.
    """
    if num_tokens < 0 or num_tokens % spec.boundary_tokens:
        raise PlanError(f"num_tokens must be a multiple of {spec.boundary_tokens} tokens, got {num_tokens}")
    if computed_tokens < 0:
        raise PlanError(f"computed_tokens must not be negative, got {computed_tokens}")
    transfers: list[Transfer] = []
    cut = spec.cut_groups
    for group_index in spec.stored_groups:
        group, table = spec.groups[group_index], _table(spec, block_ids, group_index)
        first_needed = load_start(group, num_tokens, computed_tokens) // group.block_tokens
        ends = needed_ends(spec, group_index, num_tokens, computed_tokens)
        if ends:
            # What is stored of successive chunks is contiguous from the first needed token on.
            stop = -(-num_tokens // group.block_tokens)
            ids = tuple(table[first_needed:stop])
            if len(ids) != stop - first_needed or null_block in ids:
                raise _missing_block(spec, group_index, num_tokens, computed_tokens, table, null_block)
            if group_index in cut:
                transfers += _cut_transfers(spec, group_index, ends, first_needed, ids)
            else:
                first = chunk_blocks(spec, group_index, ends[0])
                size = first.stop - first_needed
                transfers.append(Transfer(group_index, ends[0], first_needed - first.start, ids[:size]))
                step = spec.chunk_tokens // group.block_tokens
                rest = zip(ends[1:], range(size, len(ids), step), strict=True)
                transfers += [Transfer(group_index, end_token, 0, ids[i : i + step]) for end_token, i in rest]
        unwritten = table[computed_tokens // group.block_tokens : first_needed]
        if unwritten.count(null_block) != len(unwritten):
            raise PlanError(
                f"group {group_index} ({group.kind.name}) has blocks before {first_needed} that a load to {num_tokens} "
                f"would leave unwritten: {list(unwritten)}"
            )
    return tuple(transfers)


def _cut_transfers(
    spec: CacheSpec, group_index: int, ends: Sequence[int], first_needed: int, ids: tuple[int, ...]
) -> list[Transfer]:
    """Where chunks end inside blocks: the block that two of them share is in both transfers, each with its part."""
    transfers = []
    for end_token in ends:
        stored = chunk_blocks(spec, group_index, end_token)
        first = max(stored.start, first_needed)
        own = ids[first - first_needed : stored.stop - first_needed]
        transfers.append(Transfer(group_index, end_token, first - stored.start, own))
    return transfers


def _table(spec: CacheSpec, block_ids: Sequence[Sequence[int]], group_index: int) -> Sequence[int]:
    if group_index >= len(block_ids):
        raise PlanError(f"block_ids must have a table for each of {len(spec.groups)} groups, got {len(block_ids)}")
    return block_ids[group_index]


def _missing_block(
    spec: CacheSpec, group_index: int, num_tokens: int, computed_tokens: int, table: Sequence[int], null_block: int
) -> PlanError:
    """Names the blocks of the first chunk that cannot be loaded."""
    group = spec.groups[group_index]
    first_needed = load_start(group, num_tokens, computed_tokens) // group.block_tokens
    for end_token in needed_ends(spec, group_index, num_tokens, computed_tokens):
        stored = chunk_blocks(spec, group_index, end_token)
        wanted = range(max(stored.start, first_needed), stored.stop)
        ids = list(table[wanted.start : wanted.stop])
        if len(ids) != len(wanted) or null_block in ids:
            break
    return PlanError(
        f"group {group_index} ({group.kind.name}) needs blocks {wanted.start} to {wanted.stop - 1} of its "
        f"table to resume at {num_tokens}, got {ids}"
    )


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
    from `states` alone, never by position in its table: tables of running states move. A state inside a chunk is
    stored with the tails of all other groups, where the cache stores tails.

    Args:
        spec: the model's groups.
        first_token: chunks that end at or before this have been seen to; a multiple of the chunk.
        num_tokens: tokens whose content is final.
        block_ids: for every group of `spec`, the request's block table.
        states: what the engine hands over this step for this request.
        wanted: `wanted(group_index, end_token)`: False for chunks that are stored already.
        null_block: the id that stands for "no block" in a table.

    Raises:
        PlanError: `first_token` or `num_tokens` cannot be, a group that has something to store has no table, or a
            state is none of a RECURRENT group after a token.
    """
    if first_token < 0 or first_token % spec.chunk_tokens:
        raise PlanError(f"first_token must be a multiple of {spec.chunk_tokens} tokens, got {first_token}")
    if num_tokens < 0:
        raise PlanError(f"num_tokens must not be negative, got {num_tokens}")
    transfers: list[Transfer] = []
    for group_index in spec.stored_groups:
        group = spec.groups[group_index]
        if group.kind is GroupKind.RECURRENT:
            continue
        last = num_tokens - group.lookahead_tokens
        ends = range(first_token + spec.chunk_tokens, last + 1, spec.chunk_tokens)
        table = _table(spec, block_ids, group_index) if ends else ()
        for end_token in ends:
            stored = chunk_blocks(spec, group_index, end_token)
            ids = tuple(table[stored.start : stored.stop])
            if stored and len(ids) == len(stored) and null_block not in ids and wanted(group_index, end_token):
                transfers.append(Transfer(group_index, end_token, 0, ids))
    unaligned, early, incomplete = 0, 0, 0
    tails: dict[int, list[State]] = {}
    for index, state in enumerate(states):
        _require_state(spec, index, state)
        if state.num_tokens % spec.boundary_tokens or state.block_id == null_block:
            unaligned += 1
        elif state.num_tokens + spec.groups[state.group_index].lookahead_tokens > num_tokens:
            early += 1
        elif state.num_tokens % spec.chunk_tokens:
            tails.setdefault(state.num_tokens, []).append(state)
        elif wanted(state.group_index, state.num_tokens):
            transfers.append(Transfer(state.group_index, state.num_tokens, 0, (state.block_id,)))
    for end_token, its_states in tails.items():
        tail = plan_tail(spec, end_token, num_tokens, block_ids, its_states, wanted, null_block)
        transfers += tail.transfers
        incomplete += tail.incomplete_tails
    return StorePlan(tuple(transfers), unaligned, incomplete, early)


def _require_state(spec: CacheSpec, index: int, state: State) -> None:
    group_index, groups = state.group_index, spec.groups
    if not 0 <= group_index < len(groups):
        raise PlanError(f"states[{index}].group_index must be one of {len(groups)} groups, from 0, got {group_index}")
    kind = groups[group_index].kind
    if kind is not GroupKind.RECURRENT:
        raise PlanError(
            f"states[{index}].group_index must be that of a RECURRENT group, got {group_index} ({kind.name})"
        )
    if state.num_tokens <= 0:
        raise PlanError(f"states[{index}].num_tokens must be positive, got {state.num_tokens}")


def plan_tail(
    spec: CacheSpec,
    end_token: int,
    num_tokens: int,
    block_ids: Sequence[Sequence[int]],
    states: Sequence[State],
    wanted: Callable[[int, int], bool],
    null_block: int = 0,
) -> StorePlan:
    """The tail that ends at `end_token`, inside a chunk: every group's part, or nothing where one group has none.

    `plan_store` does this for every state that it is given inside a chunk. For a cache without RECURRENT groups the
    caller says where a tail is worth its bytes: at the end of a prompt, say.

    Args:
        spec: a cache with `tail_tokens`.
        end_token: a multiple of `spec.tail_tokens`, not of the chunk.
        num_tokens: tokens whose content is final.
        block_ids: for every group of `spec`, the request's block table.
        states: of every RECURRENT group the state at `end_token`.
        wanted: `wanted(group_index, end_token)`: False for parts that are stored already.
        null_block: the id that stands for "no block" in a table.

    Raises:
        ValueError: `end_token` is no tail of this cache.
        PlanError: a group that has a part of it has no table.
    """
    if spec.tail_tokens is None or end_token <= 0 or end_token % spec.tail_tokens or end_token % spec.chunk_tokens == 0:
        raise ValueError(
            f"end_token must be a multiple of tail_tokens ({spec.tail_tokens}) inside a chunk of {spec.chunk_tokens}, "
            f"got {end_token}"
        )
    handed_over = {state.group_index: state.block_id for state in states if state.num_tokens == end_token}
    transfers: list[Transfer] = []
    for group_index in spec.stored_groups:
        group = spec.groups[group_index]
        stored = chunk_blocks(spec, group_index, end_token)
        ids: tuple[int, ...] = ()
        if end_token + group.lookahead_tokens > num_tokens:
            pass  # not final yet
        elif group.kind is GroupKind.RECURRENT:
            ids = (handed_over.get(group_index, null_block),)
        elif stored:
            ids = tuple(_table(spec, block_ids, group_index)[stored.start : stored.stop])
        if len(ids) != len(stored) or null_block in ids:
            return StorePlan((), incomplete_tails=1)
        if stored:
            transfers.append(Transfer(group_index, end_token, 0, ids))
    return StorePlan(tuple(t for t in transfers if wanted(t.group_index, t.end_token)))
