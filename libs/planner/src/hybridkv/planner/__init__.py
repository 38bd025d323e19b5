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
from hybridkv.planner.announcements import Announcement, Announcer, ChunkNode, News
from hybridkv.planner.checkpoints import (
    NO_EXPERIENCE,
    Costs,
    Experience,
    Kept,
    LeftOut,
    Limits,
    Market,
    OutgrownStates,
    Placement,
    Prompt,
    SeenPrefixes,
    Stop,
    StopReason,
    keep,
    learn_request,
    learn_stored,
    next_stop,
    plan_stops,
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
from hybridkv.planner.local import LocalCopies, find_local_copies, has_local_copies
from hybridkv.planner.lookup import Lookup, LookupResult, RangeLookup
from hybridkv.planner.loss import Loss, measure_loss
from hybridkv.planner.offload_units import HybridOffloadPlanner
from hybridkv.planner.paths import needed_before, needed_parts, path_order
from hybridkv.planner.plans import plan_load, plan_load_runs, plan_store, storable_ends
from hybridkv.planner.rates import UNKNOWN_RATE, Rate, observe, seconds_per_token
from hybridkv.planner.retention import Retention, deepest_state, retain
from hybridkv.planner.tails import plan_tail
from hybridkv.planner.transfers import PlanError, State, StorePlan, Transfer, TransferRun, transfers_of

__all__ = [
    "AUTO",
    "NO_EXPERIENCE",
    "UNKNOWN_RATE",
    "UNKNOWN_RATES",
    "Announcement",
    "Announcer",
    "Answer",
    "CacheSpec",
    "Choice",
    "ChunkNode",
    "ClippedBlocks",
    "Costs",
    "Experience",
    "Finding",
    "GroupKind",
    "GroupSpec",
    "Hit",
    "HybridOffloadPlanner",
    "Kept",
    "LeftOut",
    "Limits",
    "LoadAdmission",
    "LocalCopies",
    "Lookup",
    "LookupResult",
    "Loss",
    "Market",
    "Miss",
    "News",
    "OutgrownStates",
    "Pass",
    "Pending",
    "Placement",
    "PlanError",
    "Problem",
    "Prompt",
    "RangeLookup",
    "Rate",
    "Rates",
    "Retention",
    "Room",
    "RoomBounds",
    "RoomWait",
    "SeenPrefixes",
    "State",
    "Stop",
    "StopReason",
    "StorePlan",
    "Take",
    "TokenSpan",
    "Transfer",
    "TransferRun",
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
    "deepest_state",
    "diagnose",
    "find_local_copies",
    "gate_load",
    "gate_lookup",
    "has_local_copies",
    "is_weight",
    "keep",
    "last_boundary",
    "learn_request",
    "learn_stored",
    "life",
    "longest_hit",
    "measure_loss",
    "needed_before",
    "needed_ends",
    "needed_parts",
    "next_stop",
    "observe",
    "path_order",
    "plan_load",
    "plan_load_runs",
    "plan_stops",
    "plan_store",
    "plan_tail",
    "read_blocks",
    "resume_start",
    "retain",
    "seconds_per_token",
    "slice_group_blocks",
    "stages",
    "storable_ends",
    "transfers_of",
    "whole_chunk_unit",
    "window_blocks",
]
