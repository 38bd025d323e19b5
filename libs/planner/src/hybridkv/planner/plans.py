"""Plans of loads and stores: the blocks of each group that move."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain

from hybridkv.planner.coverage import chunk_blocks, load_start, needed_ends
from hybridkv.planner.groups import CacheSpec, GroupKind
from hybridkv.planner.transfers import (
    PlanError,
    State,
    StorePlan,
    Transfer,
    TransferRun,
    Wanted,
    table_of,
    transfers_of,
)


def plan_load(
    spec: CacheSpec, num_tokens: int, computed_tokens: int, block_ids: Sequence[Sequence[int]], null_block: int = 0
) -> tuple[Transfer, ...]:
    """Plans a load as one transfer for each chunk; see `plan_load_runs`, which makes no object for each chunk.

    Raises:
        PlanError: as `plan_load_runs`.
    """
    return transfers_of(plan_load_runs(spec, num_tokens, computed_tokens, block_ids, null_block), spec.chunk_tokens)


def plan_load_runs(
    spec: CacheSpec, num_tokens: int, computed_tokens: int, block_ids: Sequence[Sequence[int]], null_block: int = 0
) -> tuple[TransferRun, ...]:
    """Plans the load with which a request resumes at `num_tokens`.

    Args:
        spec: the model's groups.
        num_tokens: the boundary that `longest_hit` returned: a multiple of `spec.boundary_tokens`.
        computed_tokens: the prefix that the engine holds itself; a multiple of every stored group's block.
        block_ids: for every group of `spec`, the request's block table.
        null_block: id for "no block" in a table.

    Raises:
        PlanError: `num_tokens` is no boundary, `computed_tokens` is negative, a group has no table, a needed block is
            missing, or an allocated block would stay unwritten.
    """
    if num_tokens < 0 or num_tokens % spec.boundary_tokens:
        raise PlanError(f"num_tokens must be a multiple of {spec.boundary_tokens} tokens, got {num_tokens}")
    if computed_tokens < 0:
        raise PlanError(f"computed_tokens must not be negative, got {computed_tokens}")
    runs: list[TransferRun] = []
    cut = spec.cut_groups
    for group_index in spec.stored_groups:
        group, table = spec.groups[group_index], table_of(spec, block_ids, group_index)
        first_needed = load_start(group, num_tokens, computed_tokens) // group.block_tokens
        ends = needed_ends(spec, group_index, num_tokens, computed_tokens)
        if ends:
            # The stored parts of successive chunks are contiguous from the first needed token on.
            stop = -(-num_tokens // group.block_tokens)
            ids = tuple(table[first_needed:stop])
            if len(ids) != stop - first_needed or null_block in ids:
                raise _missing_block_error(spec, group_index, num_tokens, computed_tokens, table, null_block)
            make_runs = _cut_runs if group_index in cut else _whole_runs
            runs += make_runs(spec, group_index, ends, first_needed, ids)
        unwritten = table[computed_tokens // group.block_tokens : first_needed]
        if unwritten.count(null_block) != len(unwritten):
            raise PlanError(
                f"group {group_index} ({group.kind.name}) has blocks before {first_needed} that a load to {num_tokens} "
                f"would leave unwritten: {list(unwritten)}"
            )
    return tuple(runs)


def _whole_runs(
    spec: CacheSpec, group_index: int, ends: Sequence[int], first_needed: int, ids: tuple[int, ...]
) -> Iterator[TransferRun]:
    """Runs of a group with uncut blocks: the needed part of the first chunk, the whole chunks after it, and a tail."""
    step = spec.chunk_tokens // spec.groups[group_index].block_tokens
    first = chunk_blocks(spec, group_index, ends[0])
    size, num_whole = first.stop - first_needed, len(ends) - (ends[-1] % spec.chunk_tokens != 0)
    start = place = 0
    if num_whole and size != step:
        yield TransferRun(group_index, ends[0], 1, first_needed - first.start, ids[:size])
        start, place = size, 1
    if place < num_whole:
        stop = start + (num_whole - place) * step
        yield TransferRun(group_index, ends[place], num_whole - place, 0, ids[start:stop])
        start = stop
    if num_whole < len(ends):
        first_block = 0 if num_whole else first_needed - first.start
        yield TransferRun(group_index, ends[-1], 1, first_block, ids[start:])


def _cut_runs(
    spec: CacheSpec, group_index: int, ends: Sequence[int], first_needed: int, ids: tuple[int, ...]
) -> Iterator[TransferRun]:
    """Runs of a group in which chunks end inside blocks: a block that two chunks share is in both transfers."""
    for end_token in ends:
        stored = chunk_blocks(spec, group_index, end_token)
        first = max(stored.start, first_needed)
        own = ids[first - first_needed : stored.stop - first_needed]
        yield TransferRun(group_index, end_token, 1, first - stored.start, own)


def _missing_block_error(
    spec: CacheSpec, group_index: int, num_tokens: int, computed_tokens: int, table: Sequence[int], null_block: int
) -> PlanError:
    """Error that names the blocks of the first chunk that cannot be loaded."""
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
    wanted: Wanted,
    null_block: int = 0,
) -> StorePlan:
    """Plans the store of the chunks of a request that end in (first_token, num_tokens].

    A chunk is left out if the engine has freed one of its blocks (out of a window). A RECURRENT group is stored from
    `states` alone, never by position in its table, because tables of running states move. A state inside a chunk is
    stored with the tails of all other groups, if the cache stores tails.

    Args:
        spec: the model's groups.
        first_token: end of the chunks that are planned already; a multiple of the chunk.
        num_tokens: tokens with final content.
        block_ids: for every group of `spec`, the request's block table.
        states: states that the engine hands over in this step for this request.
        wanted: leaves out chunks that are stored already.
        null_block: id for "no block" in a table.

    Raises:
        PlanError: `first_token` or `num_tokens` is impossible, a group with chunks to store has no table, or a state
            is not one of a RECURRENT group after a token.
    """
    if first_token < 0 or first_token % spec.chunk_tokens:
        raise PlanError(f"first_token must be a multiple of {spec.chunk_tokens} tokens, got {first_token}")
    if num_tokens < 0:
        raise PlanError(f"num_tokens must not be negative, got {num_tokens}")
    runs: list[TransferRun] = []
    for group_index in spec.stored_groups:
        group = spec.groups[group_index]
        if group.kind is GroupKind.RECURRENT:
            continue
        last = num_tokens - group.lookahead_tokens
        ends = storable_ends(spec, group_index, first_token, last, block_ids, null_block)
        if ends and (ends := wanted(group_index, ends)):
            runs += _store_runs(spec, group_index, ends, block_ids[group_index])
    unaligned, incomplete = 0, 0
    tails: dict[int, list[State]] = {}
    for index, state in enumerate(states):
        _require_state(spec, index, state)
        if state.num_tokens % spec.boundary_tokens or state.block_id == null_block:
            unaligned += 1
        elif state.num_tokens + spec.groups[state.group_index].lookahead_tokens > num_tokens:
            continue  # the content of the state is not final yet
        elif state.num_tokens % spec.chunk_tokens:
            tails.setdefault(state.num_tokens, []).append(state)
        elif wanted(state.group_index, (state.num_tokens,)):
            runs.append(TransferRun(state.group_index, state.num_tokens, 1, 0, (state.block_id,)))
    for end_token, its_states in tails.items():
        tail = plan_tail(spec, end_token, num_tokens, block_ids, its_states, wanted, null_block)
        runs += tail.runs
        incomplete += tail.incomplete_tails
    return StorePlan(tuple(runs), unaligned, incomplete)


def _store_runs(spec: CacheSpec, group_index: int, ends: Sequence[int], table: Sequence[int]) -> Iterator[TransferRun]:
    """Runs of the chunks with these ends. All their stored blocks are in the table. The table is read once."""
    chunk, block_tokens = spec.chunk_tokens, spec.groups[group_index].block_tokens
    first, last = (chunk_blocks(spec, group_index, end) for end in (ends[0], ends[-1]))
    ids, num_blocks = tuple(table[first.start : last.stop]), len(first)
    if spec.uniform_chunk_blocks[group_index] is None:
        for end_token in ends:
            stored = chunk_blocks(spec, group_index, end_token)
            own = ids[stored.start - first.start : stored.stop - first.start]
            yield TransferRun(group_index, end_token, 1, 0, own)
        return
    step = chunk // block_tokens
    for in_a_row in _consecutive(ends, chunk):
        start = (in_a_row[0] - ends[0]) // block_tokens
        own = ids[start : start + (len(in_a_row) - 1) * step + num_blocks]
        if num_blocks != step:
            # A chunk of a short window stores only its last blocks.
            own = tuple(chain.from_iterable(own[at : at + num_blocks] for at in range(0, len(own), step)))
        yield TransferRun(group_index, in_a_row[0], len(in_a_row), 0, own)


def _consecutive(ends: Sequence[int], chunk_tokens: int) -> Iterator[range]:
    """Groups ascending ends of whole chunks into ranges, one chunk apart."""
    if isinstance(ends, range):
        yield ends
        return
    start = 0
    for place in range(1, len(ends) + 1):
        if place == len(ends) or ends[place] - ends[place - 1] != chunk_tokens:
            yield range(ends[start], ends[place - 1] + 1, chunk_tokens)
            start = place


def storable_ends(
    spec: CacheSpec,
    group_index: int,
    first_token: int,
    last_token: int,
    block_ids: Sequence[Sequence[int]],
    null_block: int = 0,
) -> Sequence[int]:
    """Ends of a group's chunks in (first_token, last_token] that have all their stored blocks in the table.

    If only the first entries of a window's table are null (the usual case), chunks are not checked one by one: a long
    prompt costs one pass over its table.

    Args:
        spec: the model's groups.
        group_index: a group that is not RECURRENT, so that it is stored by position.
        first_token: a multiple of the chunk.
        last_token: chunks that end after it are not final.
        block_ids: for every group of `spec`, the request's block table.
        null_block: id for "no block" in a table.

    Returns:
        Ascending; a range in the usual case.

    Raises:
        PlanError: a chunk ends in this range, but the group has no table.
    """
    ends = range(first_token + spec.chunk_tokens, last_token + 1, spec.chunk_tokens)
    if not ends:
        return ends
    table = table_of(spec, block_ids, group_index)
    first, last = (chunk_blocks(spec, group_index, end) for end in (ends[0], ends[-1]))
    looked_at: Sequence[int] = ends
    # For these kinds, parts start in the order of their chunks, and either all parts are empty or no part is.
    if spec.groups[group_index].kind in (GroupKind.FULL, GroupKind.WINDOW) and first and last.stop <= len(table):
        blocks = table[first.start : last.stop]
        if null_block not in blocks:
            return ends
        num_live = blocks[::-1].index(null_block)
        num_null = len(blocks) - num_live
        live = bisect_left(ends, first.start + num_null, key=lambda end: chunk_blocks(spec, group_index, end).start)
        if blocks[:num_null].count(null_block) == num_null:
            return ends[live:]
        looked_at = ends[:live]
        ends = ends[live:]
    else:
        ends = ends[:0]
    whole = [end for end in looked_at if _has_blocks(chunk_blocks(spec, group_index, end), table, null_block)]
    return (*whole, *ends)


def _has_blocks(stored: range, table: Sequence[int], null_block: int) -> bool:
    blocks = table[stored.start : stored.stop]
    return bool(stored) and len(blocks) == len(stored) and null_block not in blocks


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
    wanted: Wanted,
    null_block: int = 0,
) -> StorePlan:
    """Plans the store of one tail, which ends inside a chunk: the parts of all groups, or nothing if one is missing or
    not final.

    `plan_store` calls it for every boundary inside a chunk at which it gets a state. For a cache without RECURRENT
    groups, the caller decides where a tail is worth its bytes, for example at the end of a prompt.

    Args:
        spec: a cache with `tail_tokens`.
        end_token: a multiple of `spec.tail_tokens`, not of the chunk.
        num_tokens: tokens with final content.
        block_ids: for every group of `spec`, the request's block table.
        states: the state of every RECURRENT group at `end_token`.
        wanted: leaves out parts that are stored already.
        null_block: id for "no block" in a table.

    Raises:
        ValueError: no tail of this cache ends at `end_token`.
        PlanError: a group with a part of the tail has no table.
    """
    if spec.tail_tokens is None or end_token <= 0 or end_token % spec.tail_tokens or end_token % spec.chunk_tokens == 0:
        raise ValueError(
            f"end_token must be a multiple of tail_tokens ({spec.tail_tokens}) inside a chunk of {spec.chunk_tokens}, "
            f"got {end_token}"
        )
    handed_over = {state.group_index: state.block_id for state in states if state.num_tokens == end_token}
    runs: list[TransferRun] = []
    for group_index in spec.stored_groups:
        group = spec.groups[group_index]
        stored = chunk_blocks(spec, group_index, end_token)
        ids: tuple[int, ...] = ()
        if end_token + group.lookahead_tokens > num_tokens:
            pass  # not final yet
        elif group.kind is GroupKind.RECURRENT:
            ids = (handed_over.get(group_index, null_block),)
        elif stored:
            ids = tuple(table_of(spec, block_ids, group_index)[stored.start : stored.stop])
        if len(ids) != len(stored) or null_block in ids:
            return StorePlan((), incomplete_tails=1)
        if stored:
            runs.append(TransferRun(group_index, end_token, 1, 0, ids))
    return StorePlan(tuple(run for run in runs if wanted(run.group_index, (run.end_token,))))
