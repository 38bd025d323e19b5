"""Usable tokens of a producer's blocks, by brute force over small tables."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm.nixl.params import ParamsError, RankAddress, RemotePrompt
from hybridkv.connectors.vllm.nixl.prompts import require_blocks, usable_tokens, withheld_tokens
from hybridkv.peers.leases import Lease
from hybridkv.peers.tables import offered
from hybridkv.planner import GroupKind, GroupSpec, read_blocks

FULL = GroupSpec(GroupKind.FULL, 4)
WINDOW = GroupSpec(GroupKind.WINDOW, 4, window_tokens=6)
CHUNKED = GroupSpec(GroupKind.CHUNKED, 4, align_tokens=8)
RECURRENT = GroupSpec(GroupKind.RECURRENT, 4)
SCRATCH = GroupSpec(GroupKind.SCRATCH, 4)
MIXES = [(FULL,), (FULL, WINDOW), (RECURRENT, FULL), (CHUNKED, FULL), (WINDOW, FULL, SCRATCH)]


def held(groups: tuple[GroupSpec, ...], num_tokens: int) -> RemotePrompt:
    """Prompt of a producer that has computed this many tokens, and dropped blocks that the next token does not read."""
    blocks = -(-num_tokens // 4)
    tables = [list(range(1 + 100 * i, 1 + 100 * i + blocks)) for i in range(len(groups))]
    tables = [
        [block if place >= read_blocks(group, num_tokens).start else 0 for place, block in enumerate(table)]
        for group, table in zip(groups, tables, strict=True)
    ]
    kept = offered(groups, tables, num_tokens)
    return RemotePrompt(
        engine_id="e",
        request_id="r",
        host="h",
        ranks=(RankAddress(1, "n"),),
        num_tokens=num_tokens,
        block_ids=kept.block_ids,
        first_blocks=kept.first_blocks,
        block_tokens=tuple(group.block_tokens for group in groups),
        lease=Lease(0, 1),
        lease_seconds=1.0,
        prefix_tokens=num_tokens,
        prefix="p",
    )


@pytest.mark.parametrize("groups", MIXES)
@given(num_tokens=st.integers(2, 40))
def test_a_prompt_without_the_withheld_tokens_is_used_up_to_its_last_token(
    groups: tuple[GroupSpec, ...], num_tokens: int
) -> None:
    withheld = withheld_tokens(groups, lookahead_tokens=1)
    prompt = held(groups, num_tokens - withheld)
    assert usable_tokens(groups, prompt, num_tokens, withheld) == num_tokens - 1
    require_blocks(groups, prompt, num_tokens - 1, 0)


@pytest.mark.parametrize("groups", [(RECURRENT, FULL)])
@given(num_tokens=st.integers(2, 40), extra=st.integers(0, 9))
def test_a_state_that_includes_the_last_token_is_refused(
    groups: tuple[GroupSpec, ...], num_tokens: int, extra: int
) -> None:
    with pytest.raises(ParamsError, match="state"):
        usable_tokens(groups, held(groups, num_tokens + extra), num_tokens, 1)


def test_a_window_that_includes_the_last_token_may_lack_its_first() -> None:
    """Reason to withhold the last token from windows too: the last of 13 tokens sees 7 to 12."""
    groups = (FULL, WINDOW)
    assert usable_tokens(groups, held(groups, 12), 13, 1) == 12
    require_blocks(groups, held(groups, 12), 12, 0)
    with pytest.raises(ParamsError, match="remote_block_ids"):
        require_blocks(groups, held(groups, 13), usable_tokens(groups, held(groups, 13), 13, 1), 0)


def test_freed_blocks_that_a_larger_block_needs_are_named() -> None:
    """The window of token 14 begins with token 9. The producer's engine has freed the blocks before token 8."""
    ours = (GroupSpec(GroupKind.FULL, 12), GroupSpec(GroupKind.WINDOW, 12, window_tokens=6))
    prompt = held((FULL, WINDOW), 14)
    assert usable_tokens(ours, prompt, 15, 1) == 14
    with pytest.raises(ParamsError, match="blocks 0 to 4 are not complete") as caught:
        require_blocks(ours, prompt, 14, 0)
    assert caught.value.key == "remote_block_ids[1]"
    require_blocks(ours, prompt, 14, 12)
    require_blocks(ours, msgspec.structs.replace(prompt, block_ids=((1, 2, 3, 4), (101, 102, 103, 104))), 14, 0)


@pytest.mark.parametrize("groups", MIXES)
@given(num_tokens=st.integers(9, 40), data=st.data())
def test_a_missing_block_is_named(groups: tuple[GroupSpec, ...], num_tokens: int, data: st.DataObject) -> None:
    prompt = held(groups, num_tokens - withheld_tokens(groups, 1))
    reads = {i: read_blocks(group, num_tokens - 1) for i, group in enumerate(groups)}
    index = data.draw(st.sampled_from([i for i, places in reads.items() if places]))
    ids = list(prompt.block_ids[index])
    place = data.draw(st.sampled_from(reads[index])) - prompt.first_blocks[index]
    if data.draw(st.booleans()):
        del ids[place:]
    else:
        ids[place] = 0
    lists = (*prompt.block_ids[:index], tuple(ids), *prompt.block_ids[index + 1 :])
    with pytest.raises(ParamsError) as caught:
        require_blocks(groups, msgspec.structs.replace(prompt, block_ids=lists), num_tokens - 1, 0)
    assert caught.value.key == f"remote_block_ids[{index}]"


def test_another_number_of_groups_is_refused() -> None:
    with pytest.raises(ParamsError, match="groups"):
        usable_tokens((FULL, FULL), held((FULL,), 8), 9, 1)


def test_more_lookahead_tokens_withhold_more_tokens() -> None:
    assert [withheld_tokens((FULL,), n) for n in (1, 2, 4)] == [0, 1, 3]
    assert [withheld_tokens((FULL, WINDOW), n) for n in (1, 2, 4)] == [1, 1, 3]
