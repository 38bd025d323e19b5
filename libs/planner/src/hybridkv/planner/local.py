"""Which parts of a load an engine holds itself, in blocks of its own that no request of it may resume from."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from hybridkv.planner.coverage import chunk_blocks
from hybridkv.planner.groups import CacheSpec, GroupKind
from hybridkv.planner.transfers import Transfer, TransferRun


class LocalCopies(msgspec.Struct, frozen=True):
    """What need not be read from a tier.

    Args:
        block_ids: for each transfer the engine's blocks with the same content, in the order of its own; none where it
            is read from the tier.
        num_tokens: of chunks of which nothing is read but states.
    """

    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int


def find_local_copies(
    spec: CacheSpec, transfers: Sequence[Transfer], computed_tokens: int, held: Callable[[int, int], int | None]
) -> LocalCopies:
    """Finds the transfers of a load that may be copied from the engine's own blocks.

    An engine that lacks a state goes no further than the last one, whatever attention it holds beyond. Never a state:
    an engine may go on writing where it keeps one. Never a drafter's block, whose last token depends on the one that
    follows it, which the block's name does not say. Never a part of a block, nor a tail. A transfer is copied whole or
    not at all.

    Args:
        spec: the model's groups.
        transfers: of a load, as `plan_load` gives them.
        computed_tokens: the prefix that the engine holds itself.
        held: for a group and the place of a block in its table, the engine's own block of that content; None without
            one. Of a FULL group nothing is asked behind the first block that is not there.
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
    """Whether `find_local_copies` may find anything of these. Mostly it does not: then few blocks are asked for.

    Args:
        spec: the model's groups.
        runs: of a load, as `plan_load_runs` gives them.
        held: as of `find_local_copies`.
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
