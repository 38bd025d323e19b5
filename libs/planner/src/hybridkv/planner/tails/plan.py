"""The plan of one tail."""

from collections.abc import Sequence

from hybridkv.planner.coverage import chunk_blocks
from hybridkv.planner.groups import CacheSpec, GroupKind
from hybridkv.planner.transfers import State, StorePlan, TransferRun, Wanted, table_of


def plan_tail(
    spec: CacheSpec,
    end_token: int,
    num_tokens: int,
    block_ids: Sequence[Sequence[int]],
    states: Sequence[State],
    wanted: Wanted,
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
        wanted: leaves out what is stored already.
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
