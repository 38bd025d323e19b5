"""How files and directories of a store are called."""

from __future__ import annotations

import re

from hybridkv.tiers.disk.format.layout import LARGEST_NUMBER

LOCK_NAME = "LOCK"
FINGERPRINT_NAME = "namespace.json"
EPOCH_NAME = "epoch"
SNAPSHOT_NAME = "snapshot"
CHANGES_NAME = "changes"
JOURNAL_NAME = "quarantine"
WRITTEN_NAMES = (FINGERPRINT_NAME, EPOCH_NAME, SNAPSHOT_NAME, CHANGES_NAME, JOURNAL_NAME)
"""Those that are written beside and then renamed."""

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"segment-([0-9]{10})")
_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,5})")


def is_namespace(name: str) -> bool:
    return _NAMESPACE.fullmatch(name) is not None


def is_namespace_file(name: str) -> bool:
    """Whether a namespace has a file of this name, perhaps while it is being written."""
    return name == LOCK_NAME or name.removesuffix(".new") in WRITTEN_NAMES


def segment_name(number: int) -> str:
    return f"segment-{number:010d}"


def segment_number(name: str) -> int | None:
    """None when it is no segment's name, or that of a number that no segment can have."""
    found = _SEGMENT.fullmatch(name)
    number = int(found[1]) if found else LARGEST_NUMBER + 1
    return number if number <= LARGEST_NUMBER else None


def rank_name(rank: int) -> str:
    return f"rank-{rank}"


def rank_number(name: str) -> int | None:
    found = _RANK.fullmatch(name)
    return int(found[1]) if found else None
