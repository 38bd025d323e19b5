"""Tiers: media that hold KV-cache chunks by key. The contract is in `contract`; each tier has its own folder."""

from hybridkv.tiers import native as native  # fails first if the extension is missing
from hybridkv.tiers.changes import Changes, ReportsChanges
from hybridkv.tiers.contract import (
    BatchedIndex,
    BatchedMedium,
    Completion,
    ExposesBytes,
    Extends,
    Failure,
    FailureReason,
    Key,
    LookupAnswer,
    LookupCounts,
    NewChunk,
    Refusal,
    SealedMemory,
    Slot,
    SyncLookups,
    Ticket,
    TierCounts,
    TierIndex,
    TierMedium,
)
from hybridkv.tiers.errors import TierConfigurationError, TierError, TierProtocolError, is_shortage

__all__ = [
    "BatchedIndex",
    "BatchedMedium",
    "Changes",
    "Completion",
    "ExposesBytes",
    "Extends",
    "Failure",
    "FailureReason",
    "Key",
    "LookupAnswer",
    "LookupCounts",
    "NewChunk",
    "Refusal",
    "ReportsChanges",
    "SealedMemory",
    "Slot",
    "SyncLookups",
    "Ticket",
    "TierConfigurationError",
    "TierCounts",
    "TierError",
    "TierIndex",
    "TierMedium",
    "TierProtocolError",
    "is_shortage",
]
