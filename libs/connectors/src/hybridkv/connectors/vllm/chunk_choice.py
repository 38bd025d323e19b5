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
            f"(blocks of {whole})",
            chunk,
            f'use {nearest}, or "auto"' if nearest else _longer(unit),
        )
    raise ConfigurationError(
        path,
        f"less than max_model_len, so that some prompt can hit (the groups need multiples of {unit})",
        f"{chunk} with max_model_len {max_model_len}",
        f"use {nearest}, or {_longer(chunk)}" if nearest else _longer(chunk),
    )


def _auto_chunk(specs: Sequence[GroupSpec], max_model_len: int, hash_tokens: int) -> int:
    """Whole blocks of every group; where no prompt reaches that, of those groups that cannot be cut."""
    is_recurrent = any(spec.kind is GroupKind.RECURRENT for spec in specs)
    units = [math.lcm(unit, hash_tokens) for unit in (whole_chunk_unit(specs), chunk_unit(specs))]
    chunks = [unit if is_recurrent else -(-AUTO_CHUNK_TOKENS // unit) * unit for unit in units]
    return next((chunk for chunk in chunks if chunk < max_model_len), chunks[0])


def _longer(chunk: int) -> str:
    return f"raise --max-model-len above {chunk}, or lower --block-size"
