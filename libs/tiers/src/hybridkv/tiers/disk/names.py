"""How files and directories of a store are called."""

from __future__ import annotations

import re

LOCK_NAME = "LOCK"
FINGERPRINT_NAME = "namespace.json"
EPOCH_NAME = "epoch"
SNAPSHOT_NAME = "snapshot"
CHANGES_NAME = "changes"
JOURNAL_NAME = "quarantine"

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"segment-([0-9]{10})")
_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,5})")


def is_namespace(name: str) -> bool:
    return _NAMESPACE.fullmatch(name) is not None


def segment_name(number: int) -> str:
    return f"segment-{number:010d}"


def segment_number(name: str) -> int | None:
    found = _SEGMENT.fullmatch(name)
    return int(found[1]) if found else None


def rank_name(rank: int) -> str:
    return f"rank-{rank}"


def rank_number(name: str) -> int | None:
    found = _RANK.fullmatch(name)
    return int(found[1]) if found else None
