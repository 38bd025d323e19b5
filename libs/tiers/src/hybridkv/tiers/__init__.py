"""Media that hold chunks by key. The contract stands here; each medium has its own folder."""

from hybridkv.tiers import native as native  # without which nothing here is imported
from hybridkv.tiers.changes import Changes, TellsChanges
from hybridkv.tiers.contract import (
    Answer,
    AnswersAtOnce,
    Completion,
    ExposesBytes,
    Failure,
    FailureReason,
    GathersMoves,
    GathersPlaces,
    Heard,
    Key,
    Refusal,
    SealedMemory,
    Slot,
    Ticket,
    TierCounts,
    TierIndex,
    TierMedium,
)
from hybridkv.tiers.errors import TierConfigurationError, TierError, TierProtocolError, is_shortage

__all__ = [
    "Answer",
    "AnswersAtOnce",
    "Changes",
    "Completion",
    "ExposesBytes",
    "Failure",
    "FailureReason",
    "GathersMoves",
    "GathersPlaces",
    "Heard",
    "Key",
    "Refusal",
    "SealedMemory",
    "Slot",
    "TellsChanges",
    "Ticket",
    "TierConfigurationError",
    "TierCounts",
    "TierError",
    "TierIndex",
    "TierMedium",
    "TierProtocolError",
    "is_shortage",
]
