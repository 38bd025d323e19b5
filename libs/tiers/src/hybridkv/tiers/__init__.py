"""Tiers: media that hold KV-cache chunks by key. The contract is in `contract`; each medium has its own folder."""

from hybridkv.tiers import native as native  # fails first if the extension is missing
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
