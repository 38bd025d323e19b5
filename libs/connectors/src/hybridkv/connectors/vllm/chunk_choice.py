"""How many tokens a chunk has: what the operator says, if prompts can hit with it, or what suits the groups.

The laws are the planner's, and so is the diagnosis; here they become words of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    HybridOffloadPlanner,
    Problem,
    chunk_unit,
    diagnose,
    whole_chunk_unit,
)

AUTO_CHUNK_TOKENS = 128
"""An automatic chunk is the smallest one that fits all groups and has this many tokens, unless a state limits it."""
MAX_TAIL_BLOCKS = 8
"""A tail holds all of its chunk that is before its end, once more for every prompt that ends elsewhere in it, and as
many sizes occur. Chunks of more blocks have none."""


def choose_chunk(
    specs: Sequence[GroupSpec], wanted: int | Literal["auto"], max_model_len: int, hash_tokens: int
) -> int:
    """Tokens in a chunk, as the operator wants them.

    Args:
        specs: the engine's groups.
        wanted: what `chunk_tokens` says.
        max_model_len: tokens in the longest request.
        hash_tokens: tokens that each of the engine's block hashes adds.

    Raises:
        ConfigurationError: the chunk gains nothing, or no prompt can hit; the hint says what would work.
    """
    chunk = _auto_chunk(specs, max_model_len, hash_tokens) if wanted == "auto" else wanted
    findings = diagnose(HybridOffloadPlanner.of_groups(specs, hash_tokens, chunk), max_model_len)
    if not findings:
        return chunk
    unit, path, found = math.lcm(chunk_unit(specs), hash_tokens), f"{ROOT}.chunk_tokens", findings[0]
    nearest = found.nearest_chunk_tokens
    if found.problem is Problem.NO_GAIN:
        whole = sorted(
            {spec.block_tokens for spec in specs if spec.kind is not GroupKind.SCRATCH and not spec.part_tokens}
        )
        raise ConfigurationError(
            path,
            f"a multiple of {unit} tokens, so that a chunk is whole blocks of every group that cannot be cut "
            f"(blocks of {whole}){_largest_part(specs, hash_tokens)}",
            chunk,
            f'use {nearest}, or "auto"' if nearest else _longer(unit),
        )
    raise ConfigurationError(
        path,
        f"less than max_model_len, so that some prompt can hit; the groups need multiples of {unit} tokens"
        + _largest_part(specs, hash_tokens),
        f"{chunk} with max_model_len {max_model_len}",
        f"use {nearest}, or {_longer(chunk)}" if nearest else _longer(chunk),
    )


def _largest_part(specs: Sequence[GroupSpec], hash_tokens: int) -> str:
    """Words that name the groups without which the common multiple is smallest; none where all groups are alike."""
    units = {index: spec.unit_tokens for index, spec in enumerate(specs) if spec.kind is not GroupKind.SCRATCH}
    without = {unit: math.lcm(hash_tokens, *(set(units.values()) - {unit})) for unit in units.values()}
    if len(without) < 2:
        return ""
    largest = min(without, key=lambda unit: (without[unit], -unit))
    names = ", ".join(
        f"{index} ({specs[index].kind}, {'parts' if specs[index].part_tokens else 'blocks'} of {unit} tokens)"
        for index, unit in units.items()
        if unit == largest
    )
    return f"; multiples of {without[largest]} without group {names}"


def _auto_chunk(specs: Sequence[GroupSpec], max_model_len: int, hash_tokens: int) -> int:
    """Whole blocks of every group; where no prompt reaches that, of those groups that cannot be cut."""
    is_recurrent = any(spec.kind is GroupKind.RECURRENT for spec in specs)
    units = [math.lcm(unit, hash_tokens) for unit in (whole_chunk_unit(specs), chunk_unit(specs))]
    chunks = [unit if is_recurrent else -(-AUTO_CHUNK_TOKENS // unit) * unit for unit in units]
    return next((chunk for chunk in chunks if chunk < max_model_len), chunks[0])


def choose_tail(spec: CacheSpec, hit_tokens: int | None, hash_tokens: int) -> int | None:
    """The grid of tails, in tokens: None where nothing is stored that ends inside a chunk.

    A tail is stored only with a state at its end, and the engine hands over such states only where its own hits end
    inside blocks. A block is stored whole, whatever stands behind the tail: so none is cut. Left out are drafters,
    because on an engine with one nobody has tried, and groups with smaller blocks than a state's, as windows beside
    such states would have: vLLM 0.32 lets a prefill end where a smaller block does and a state's does not.

    Args:
        spec: the engine's groups, and the chunk.
        hit_tokens: the engine's own hits end at multiples of this; None where it does not say.
        hash_tokens: tokens that each of the engine's block hashes adds, by which tails are named.
    """
    if hit_tokens is None or hit_tokens % hash_tokens or hit_tokens >= whole_chunk_unit(spec.groups):
        return None
    groups = [spec.groups[index] for index in spec.stored_groups]
    if {group.kind for group in groups} != {GroupKind.FULL, GroupKind.RECURRENT} or spec.lookahead_tokens:
        return None
    shortest = min(group.block_tokens for group in groups)
    if any(group.kind is GroupKind.RECURRENT and group.block_tokens != shortest for group in groups):
        return None
    if spec.cut_groups or spec.chunk_tokens % hit_tokens or spec.chunk_tokens > MAX_TAIL_BLOCKS * shortest:
        return None
    return hit_tokens


def _longer(chunk: int) -> str:
    return f"raise --max-model-len above {chunk}, or lower --block-size"
