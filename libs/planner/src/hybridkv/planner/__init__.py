"""Decisions about hybrid KV caches as total, pure functions: no clock, no I/O, no randomness, no torch, no engine.

A prefix can be resumed at token N only if every KV cache group can. This library knows what each kind of group needs
for that, finds the longest such N in a store, and says which blocks move; and it says what becomes of a request that
wants to load: `life`, over the values of `stages`. It holds no bytes and no keys.
"""

from hybridkv.planner import life, stages
from hybridkv.planner.admission import (
    LoadAdmission,
    Room,
    RoomBounds,
    RoomWait,
    Verdict,
    admit,
    blocks_to_run,
    gate_load,
    gate_lookup,
)
from hybridkv.planner.choice import (
    AUTO,
    UNKNOWN_RATES,
    Answer,
    Choice,
    Pass,
    Rates,
    Take,
    Unusable,
    Wait,
    Weight,
    choose,
    is_weight,
)
from hybridkv.planner.clipping import ClippedBlocks, clip_blocks, read_blocks, window_blocks
from hybridkv.planner.coverage import (
    chunk_blocks,
    chunk_span,
    coverage,
    needed_ends,
    resume_start,
)
from hybridkv.planner.diagnosis import Finding, Problem, diagnose
from hybridkv.planner.foreign import common_block_count, slice_group_blocks
from hybridkv.planner.groups import CacheSpec, GroupKind, GroupSpec, TokenSpan, chunk_unit, whole_chunk_unit
from hybridkv.planner.hit import Hit, Miss, Pending, last_boundary, longest_hit
from hybridkv.planner.lookup import Lookup, LookupResult, RangeLookup
from hybridkv.planner.loss import Loss, measure_loss
from hybridkv.planner.offload_units import HybridOffloadPlanner
from hybridkv.planner.paths import needed_before, needed_parts, path_order
from hybridkv.planner.plans import plan_load, plan_store
from hybridkv.planner.rates import UNKNOWN_RATE, Rate, observe, seconds_per_token
from hybridkv.planner.tails import plan_tail
from hybridkv.planner.transfers import PlanError, State, StorePlan, Transfer

__all__ = [
    "AUTO",
    "UNKNOWN_RATE",
    "UNKNOWN_RATES",
    "Answer",
    "CacheSpec",
    "Choice",
    "ClippedBlocks",
    "Finding",
    "GroupKind",
    "GroupSpec",
    "Hit",
    "HybridOffloadPlanner",
    "LoadAdmission",
    "Lookup",
    "LookupResult",
    "Loss",
    "Miss",
    "Pass",
    "Pending",
    "PlanError",
    "Problem",
    "RangeLookup",
    "Rate",
    "Rates",
    "Room",
    "RoomBounds",
    "RoomWait",
    "State",
    "StorePlan",
    "Take",
    "TokenSpan",
    "Transfer",
    "Unusable",
    "Verdict",
    "Wait",
    "Weight",
    "admit",
    "blocks_to_run",
    "choose",
    "chunk_blocks",
    "chunk_span",
    "chunk_unit",
    "clip_blocks",
    "common_block_count",
    "coverage",
    "diagnose",
    "gate_load",
    "gate_lookup",
    "is_weight",
    "last_boundary",
    "life",
    "longest_hit",
    "measure_loss",
    "needed_before",
    "needed_ends",
    "needed_parts",
    "observe",
    "path_order",
    "plan_load",
    "plan_store",
    "plan_tail",
    "read_blocks",
    "resume_start",
    "seconds_per_token",
    "slice_group_blocks",
    "stages",
    "whole_chunk_unit",
    "window_blocks",
]
