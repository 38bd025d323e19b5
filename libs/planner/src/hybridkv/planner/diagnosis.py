"""Checks of offload units at start-up, with hints for the operator."""

import enum
import math
from collections.abc import Iterator

import msgspec

from hybridkv.planner.offload_units import HybridOffloadPlanner, offload_unit


class Problem(enum.StrEnum):
    """Kind of a finding."""

    UNSPLIT_GROUP = "unsplit_group"
    """A group's block is larger than the chunk and not divisible by it, so the group is stored in whole blocks only."""
    UNHASHABLE_UNIT = "unhashable_unit"
    """The parts in which a group is stored (units) are not whole hash blocks, so no block hash names a unit."""
    MISALIGNED_CHUNK = "misaligned_chunk"
    """The chunk is not a multiple of `boundary_unit`: some chunks end where no prefix can be resumed."""
    OFFLOAD_DISABLED = "offload_disabled"
    """No prompt within max_model_len is long enough for a hit."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem, with suggestions.

    Args:
        problem: kind of the problem.
        needed_tokens: UNSPLIT_GROUP, UNHASHABLE_UNIT: tokens of a prompt before the group is stored. MISALIGNED_CHUNK,
            OFFLOAD_DISABLED: length of the shortest prompt with a hit; for MISALIGNED_CHUNK, with the best chunk.
        message: text with a hint.
        group_index: the group; None for all groups.
        nearest_max_model_len: smallest max_model_len that works with this chunk.
        nearest_chunk_tokens: the nearest chunk size that works with this max_model_len; None without one. Such a chunk
            is whole hash blocks, is at most max_model_len, allows a hit, and makes no further group unsplit. For an
            UNSPLIT_GROUP, it also splits this group. If the unsplittable groups are known, it is a multiple of all
            their blocks.
    """

    problem: Problem
    needed_tokens: int
    message: str
    group_index: int | None = None
    nearest_max_model_len: int | None = None
    nearest_chunk_tokens: int | None = None


def diagnose(planner: HybridOffloadPlanner, max_model_len: int) -> tuple[Finding, ...]:
    """Findings about a planner for a model of `max_model_len` tokens; empty if all is well.

    A finding about an unsplit group suggests the nearest chunk that splits it. A finding about disabled offload
    suggests the nearest chunk and the nearest max_model_len that work. A followed suggestion removes its finding and
    adds no other. For use at start-up: tries at most max_model_len chunks.

    Raises:
        ValueError: `max_model_len` is not positive.
    """
    if max_model_len <= 0:
        raise ValueError(f"max_model_len must be positive, got {max_model_len}")
    if planner.unsplittable is None:
        findings = [*_unsplit_groups(planner, max_model_len), *_unhashable_units(planner)]
    else:
        # All stored parts end at chunk ends, so units need no hash and no check.
        findings = [*_misaligned_chunk(planner, max_model_len)]
    needed = tokens_for_first_hit(planner)
    if needed > max_model_len:
        step = planner.boundary_unit
        nearest = _nearest_chunks(planner, max_model_len, step)
        chunk = next((c for c in nearest if _works(planner, c, max_model_len)), None)
        keeping = " that keeps all split groups split" if planner.unsplittable is None else ""
        no_chunk = f"; with the present max_model_len, no chunk works{keeping}"
        other = f", or use a chunk of {chunk} tokens" if chunk else no_chunk
        findings.append(
            Finding(
                problem=Problem.OFFLOAD_DISABLED,
                needed_tokens=needed,
                message=(
                    f"offload is disabled in effect: a first hit needs a prompt of {needed} tokens, and max_model_len "
                    f"is {max_model_len}; raise max_model_len to {needed}{other}"
                ),
                nearest_max_model_len=needed,
                nearest_chunk_tokens=chunk,
            )
        )
    return tuple(findings)


def tokens_for_first_hit(planner: HybridOffloadPlanner) -> int:
    """Length of the shortest prompt that can hit: it completes a chunk, and has a token to compute after the hit."""
    count = planner.chunk_count_for_tokens(0) + 1
    return max(planner.chunk_end_tokens(count), planner.chunk_prefix_tokens(count) + 1)


def _unsplit_groups(planner: HybridOffloadPlanner, max_model_len: int) -> Iterator[Finding]:
    chunk = planner.fixed_chunk_size
    for index, block in enumerate(planner.gpu_block_sizes):
        if not _is_unsplit(block, chunk):
            continue
        splitting = sorted((d for d in _divisors(block) if d < block), key=lambda d: (abs(d - chunk), d))
        nearest = next((d for d in splitting if _works(planner, d, max_model_len)), None)
        never = f", which max_model_len {max_model_len} never reaches" if block >= max_model_len else ""
        hint = (
            f"use a chunk of {nearest} tokens"
            if nearest
            else f"no chunk that splits this group works with max_model_len {max_model_len} and keeps the other split "
            f"groups split"
        )
        yield Finding(
            problem=Problem.UNSPLIT_GROUP,
            needed_tokens=block,
            message=(
                f"group {index} cannot be split: its block of {block} tokens is no multiple of the chunk of {chunk}, "
                f"so nothing of it is stored before {block} tokens{never}; {hint}"
            ),
            group_index=index,
            nearest_chunk_tokens=nearest,
        )


def _misaligned_chunk(planner: HybridOffloadPlanner, max_model_len: int) -> Iterator[Finding]:
    chunk, unit = planner.fixed_chunk_size, planner.boundary_unit
    if chunk % unit == 0:
        return
    nearest = next(
        (c for c in _nearest_chunks(planner, max_model_len, unit) if _works(planner, c, max_model_len)), None
    )
    whole = sorted({planner.gpu_block_sizes[i] for i in planner.unsplittable or ()})
    because = f"where blocks of {whole} tokens end, which cannot be split" if whole else "where hash blocks end"
    hint = f"use a chunk of {nearest} tokens" if nearest else f"no chunk works with max_model_len {max_model_len}"
    yield Finding(
        problem=Problem.MISALIGNED_CHUNK,
        needed_tokens=unit + 1,
        message=(
            f"the chunk of {chunk} tokens must be a multiple of {unit}: prefixes can be resumed only there, "
            f"{because}; {hint}"
        ),
        nearest_chunk_tokens=nearest,
    )


def _unhashable_units(planner: HybridOffloadPlanner) -> Iterator[Finding]:
    for index, (unit, factor) in enumerate(zip(planner.offload_unit_sizes, planner.group_hash_factors, strict=True)):
        if factor is None:
            yield Finding(
                problem=Problem.UNHASHABLE_UNIT,
                needed_tokens=unit,
                message=(
                    f"group {index} has units of {unit} tokens, which are not whole hash blocks of "
                    f"{planner.hash_block_size}: the engine's block hashes do not name them"
                ),
                group_index=index,
            )


def _works(planner: HybridOffloadPlanner, chunk: int, max_model_len: int) -> bool:
    """True if a hit is possible with this chunk, and no further group becomes unsplit."""
    if chunk % planner.boundary_unit or chunk > max_model_len:
        return False
    if planner.unsplittable is not None:
        return tokens_for_first_hit(planner.with_chunk(chunk)) <= max_model_len
    blocks = set(planner.gpu_block_sizes)
    largest_unit = max(offload_unit(block, chunk) for block in blocks)
    if -(-largest_unit // chunk) * chunk > max_model_len:
        return False  # cheap check that rules out most chunks that do not work
    present = planner.fixed_chunk_size
    if any(_is_unsplit(block, chunk) and not _is_unsplit(block, present) for block in blocks):
        return False
    return tokens_for_first_hit(planner.with_chunk(chunk)) <= max_model_len


def _is_unsplit(block_tokens: int, chunk_tokens: int) -> bool:
    return block_tokens > chunk_tokens and block_tokens % chunk_tokens != 0


def _nearest_chunks(planner: HybridOffloadPlanner, max_model_len: int, step: int) -> Iterator[int]:
    """Multiples of `step` up to `max_model_len`, by their distance from the current chunk, the shorter multiple
    first."""
    chunk = planner.fixed_chunk_size
    below, above = (chunk - 1) // step * step, (chunk // step + 1) * step
    if below > max_model_len:
        below = max_model_len // step * step
    while below >= step or above <= max_model_len:
        if below >= step and (above > max_model_len or chunk - below <= above - chunk):
            yield below
            below -= step
        else:
            yield above
            above += step


def _divisors(value: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})
