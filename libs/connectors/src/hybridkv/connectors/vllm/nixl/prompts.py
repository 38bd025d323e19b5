"""Checks of a producer's prompt before a consumer may resume from its blocks. Pure functions.

Only a proxy connects a request with a producer's prompt, and the proxy may be wrong. So both sides digest the tokens
and the adapter's content, and a consumer uses a producer's blocks only for the tokens and the adapter from which these
blocks were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.nixl.params import ParamsError, RemotePrompt
from hybridkv.peers.cells import moved_span
from hybridkv.peers.description import NULL_BLOCK
from hybridkv.planner import GroupKind, GroupSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request

_CONTEXT = "hybridkv 2026 peer prompt v1"


def prefix_digest(request: Request, num_tokens: int, adapter: bytes) -> str:
    """Digest of the first tokens of a request, of their extra hash keys (such as a LoRA adapter's name, or images), and
    of the adapter's content.

    Args:
        request: the request.
        num_tokens: number of tokens to digest.
        adapter: digest of the adapter's content; empty without an adapter.
    """
    digest = blake3(derive_key_context=_CONTEXT)
    digest.update(np.asarray(request.all_token_ids[:num_tokens], dtype=np.int64).tobytes())
    digest.update(compat.extra_hash_bytes(request, 0, num_tokens))
    digest.update(adapter)
    return digest.hexdigest()


def withheld_tokens(groups: Sequence[GroupSpec], lookahead_tokens: int) -> int:
    """Tokens at the end of a prompt that a producer leaves to its consumer.

    A consumer computes at least the last token, for its logits. A recurrent state must be the state before that token:
    a later state would count the token twice. The engine frees blocks of a sliding window or an attention chunk as soon
    as the next token does not need these blocks, but the consumer's last token may need them. So if any group keeps
    less than all tokens, a producer stops one token early. If all groups keep all tokens, this is not necessary.

    Args:
        groups: groups of the model.
        lookahead_tokens: tokens that a drafter reads after the prompt (multi-token prediction of several modules).
    """
    keeps_all = all(group.kind in (GroupKind.FULL, GroupKind.SCRATCH) for group in groups)
    return max(0 if keeps_all else 1, lookahead_tokens - 1)


def usable_tokens(
    groups: Sequence[GroupSpec], prompt: RemotePrompt, num_prompt_tokens: int, withheld_tokens: int
) -> int:
    """Number of tokens of a request that this engine can load from its producer's blocks. `require_blocks` checks the
    blocks.

    Args:
        groups: groups of this engine.
        prompt: prompt that the producer holds.
        num_prompt_tokens: prompt tokens of the request.
        withheld_tokens: tokens at the end of the prompt that this engine always computes.

    Raises:
        ParamsError: this engine cannot resume from the producer's blocks.
    """
    if len(prompt.block_ids) != len(groups):
        raise ParamsError("remote_block_ids", f"{len(prompt.block_ids)} groups, but this engine has {len(groups)}")
    num_tokens = min(prompt.num_tokens, num_prompt_tokens - max(1, withheld_tokens))
    if num_tokens <= 0:
        return 0
    for group in groups:
        if group.kind is GroupKind.RECURRENT and num_tokens != prompt.num_tokens:
            found = f"a state after {prompt.num_tokens} tokens, but this engine needs the state after {num_tokens}"
            raise ParamsError("remote_num_tokens", found)
    return num_tokens


def require_blocks(groups: Sequence[GroupSpec], prompt: RemotePrompt, num_tokens: int, computed_tokens: int) -> None:
    """Checks that the producer holds all blocks that this engine would read. The producer's engine frees blocks before
    a window, and blocks of this engine that are larger than the producer's need tokens before the window.

    Args:
        groups: groups of this engine, as many as the prompt has.
        prompt: prompt that the producer holds.
        num_tokens: tokens that the request has after the load: see `usable_tokens`.
        computed_tokens: tokens of these that this engine already has; whole blocks.

    Raises:
        ParamsError: a block is missing.
    """
    for index, group in enumerate(groups):
        span = moved_span(group, num_tokens, computed_tokens)
        if span.num_tokens == 0:
            continue
        block_tokens = prompt.block_tokens[index]
        wanted = range(span.start // block_tokens, -(-span.end // block_tokens))
        ids, first = prompt.block_ids[index], prompt.first_blocks[index]
        held = ids[wanted.start - first : wanted.stop - first] if wanted.start >= first else ()
        if len(held) != len(wanted) or NULL_BLOCK in held:
            raise ParamsError(f"remote_block_ids[{index}]", f"blocks {wanted.start} to {wanted.stop} are not complete")
