"""Connectors with one fault each. The oracle must find each, or it proves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.offload import tiers
from hybridkv.connectors.vllm.offload.checkpoints import AnswerStates
from hybridkv.connectors.vllm.offload.hints import HintReader
from hybridkv.connectors.vllm.offload.loads.local_blocks import LocalBlocks
from hybridkv.planner import LocalCopies, State
from hybridkv.planner.hints import NO_HINTS
from hybridkv.tiers.disk.recovery import builder
from hybridkv.tiers.stack import Direction, TierMove, TierStack
from kits.plain_ledger import KeyLedger
from kits.plain_ram_index import PlainRamIndex
from kits.plain_records import PlainRecordTable
from oracle.mixes import QWEN3_NEXT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

    from hybridkv.connectors.vllm.common.requests import TrackedRequest

BLOCK = QWEN3_NEXT.alignment_tokens
answers_states = AnswerStates.states


def one_token_late(answers: AnswerStates, tracked: TrackedRequest, num_scheduled: int, tables: Any) -> list[State]:
    """The state that this step writes, under the boundary at which it begins."""
    start = tracked.request.num_computed_tokens
    if start % BLOCK or start <= tracked.request.num_prompt_tokens:
        return []
    table = tables(tracked.request_id)
    return [State(group, table[group][start // BLOCK], start) for group in answers._groups]


def one_block_late(answers: AnswerStates, tracked: TrackedRequest, num_scheduled: int, tables: Any) -> list[State]:
    """The state of a boundary, under the boundary before it."""
    found = answers_states(answers, tracked, num_scheduled, tables)
    return [State(each.group_index, each.block_id, each.num_tokens - BLOCK) for each in found]


def answers_one_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of answers are those that the next step writes."""

    def late(answers: AnswerStates, tracked: TrackedRequest, num_scheduled: int, tables: Any) -> list[State]:
        # No step follows the end of an answer.
        return one_token_late(answers, tracked, num_scheduled, tables) if num_scheduled else []

    monkeypatch.setattr(AnswerStates, "states", late)


def stops_one_block_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that the engine offers are stored under the boundary before theirs."""
    handed_over = compat.boundary_states

    def shifted(output: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        return {
            request_id: [(group, block, tokens - BLOCK) for group, block, tokens in states if tokens > BLOCK]
            for request_id, states in handed_over(output).items()
        }

    monkeypatch.setattr(compat, "boundary_states", shifted)


def of_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is copied from the one at the next place."""
    find = LocalBlocks.find

    def turned(*arguments: Any) -> LocalCopies:
        found = find(*arguments)
        ids = [each for each in found.block_ids if each]
        rest = iter([*ids[1:], *ids[:1]])
        return msgspec.structs.replace(found, block_ids=tuple(next(rest) if each else () for each in found.block_ids))

    monkeypatch.setattr(LocalBlocks, "find", turned)


def tails_without_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail under the key of its chunk's beginning: a tail of another length, or of another prompt, is found."""
    make = RequestKeys.key

    def without_length(keys: RequestKeys, group_index: int, end_token: int) -> bytes:
        chunk = keys.chunk_tokens
        if end_token % chunk and end_token > chunk:
            return make(keys, group_index, end_token // chunk * chunk) + b"tail"
        return make(keys, group_index, end_token)

    monkeypatch.setattr(RequestKeys, "key", without_length)


def hints_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hints of requests are ignored."""
    monkeypatch.setattr(HintReader, "read", lambda reader, request: NO_HINTS)


def _in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexes are the Python ones, which can be patched."""
    monkeypatch.setattr(tiers, "RamIndex", PlainRamIndex)
    monkeypatch.setattr(builder, "RecordTable", PlainRecordTable)


def evicted_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is being read may be evicted for the next store."""
    _in_python(monkeypatch)
    pin, unpin = KeyLedger.pin, KeyLedger.unpin

    def pinning(ledger: KeyLedger[Any], key: bytes) -> Any:
        slot = pin(ledger, key)
        if slot is not None:
            unpin(ledger, key)
        return slot

    def unpinning(ledger: KeyLedger[Any], key: bytes) -> None:
        if key in ledger.pinned_now:
            unpin(ledger, key)

    monkeypatch.setattr(KeyLedger, "pin", pinning)
    monkeypatch.setattr(KeyLedger, "unpin", unpinning)


def promoted_to_each_others_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk that is promoted in one step is written to the place of the next one."""
    take = TierStack.take_moves

    def turned(stack: TierStack) -> list[TierMove]:
        moves = list(take(stack))
        up = [move for move in moves if move.direction is Direction.PROMOTE]
        places = iter([*(move.primary for move in up[1:]), *(move.primary for move in up[:1])])
        return [
            msgspec.structs.replace(move, primary=next(places)) if move.direction is Direction.PROMOTE else move
            for move in moves
        ]

    monkeypatch.setattr(TierStack, "take_moves", turned)
