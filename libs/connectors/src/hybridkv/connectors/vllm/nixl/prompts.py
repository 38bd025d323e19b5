"""What must be true of a producer's prompt before a consumer may begin with it. It only reads what it is given.

A proxy says which prompt is which, and nothing else does: so both sides digest the tokens, and a producer's blocks are
taken for nothing but the tokens that they were computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.nixl.params import ParamsError, RemotePrompt
from hybridkv.planner import GroupKind, GroupSpec, read_blocks

if TYPE_CHECKING:
    from vllm.v1.request import Request

_CONTEXT = "hybridkv 2026 peer prompt v1"


def prefix_digest(request: Request, num_tokens: int) -> str:
    """Stands for the first tokens of a request and for what tells them apart besides their ids."""
    digest = blake3(derive_key_context=_CONTEXT)
    digest.update(np.asarray(request.all_token_ids[:num_tokens], dtype=np.int64).tobytes())
    digest.update(compat.extra_hash_bytes(request, 0, num_tokens))
    return digest.hexdigest()


def withheld_tokens(groups: Sequence[GroupSpec], lookahead_tokens: int) -> int:
    """Tokens at the end of a prompt that a producer leaves to its consumer.

    A consumer computes at least the last token, for its logits. A state must be the one before that token: one behind
    it would take the token in twice. A window's or an attention chunk's blocks are dropped as soon as the token after
    them needs them no more, and the last token might. So a producer of any group that keeps less than everything stops
    one token short; one whose groups keep everything need not.

    Args:
        groups: of the model.
        lookahead_tokens: that a drafter reads beyond the prompt (multi-token prediction of several modules).
    """
    keeps_all = all(group.kind in (GroupKind.FULL, GroupKind.SCRATCH) for group in groups)
    return max(0 if keeps_all else 1, lookahead_tokens - 1)


def usable_tokens(
    groups: Sequence[GroupSpec], prompt: RemotePrompt, num_prompt_tokens: int, withheld_tokens: int
) -> int:
    """How many tokens of a request its producer's blocks are good for.

    Args:
        groups: this engine's.
        prompt: what the producer holds.
        num_prompt_tokens: of the request.
        withheld_tokens: of the prompt, those that are computed here in any case.

    Raises:
        ParamsError: the producer's blocks cannot be resumed from.
    """
    if len(prompt.block_ids) != len(groups):
        raise ParamsError("remote_block_ids", f"{len(prompt.block_ids)} groups, and this engine has {len(groups)}")
    num_tokens = min(prompt.num_tokens, num_prompt_tokens - max(1, withheld_tokens))
    if num_tokens <= 0:
        return 0
    for index, group in enumerate(groups):
        if group.kind is GroupKind.RECURRENT and num_tokens != prompt.num_tokens:
            raise ParamsError(
                "remote_num_tokens", f"a state after {prompt.num_tokens} tokens, where one after {num_tokens} is needed"
            )
        wanted = read_blocks(_with_block(group, prompt.block_tokens[index]), num_tokens)
        ids, first = prompt.block_ids[index], prompt.first_blocks[index]
        held = ids[max(0, wanted.start - first) : max(0, wanted.stop - first)] if wanted.start >= first else ()
        if len(held) != len(wanted) or 0 in held:
            raise ParamsError(f"remote_block_ids[{index}]", f"not all of the blocks {wanted.start} to {wanted.stop}")
    return num_tokens


def _with_block(group: GroupSpec, block_tokens: int) -> GroupSpec:
    return GroupSpec(group.kind, block_tokens, group.window_tokens, group.align_tokens)
