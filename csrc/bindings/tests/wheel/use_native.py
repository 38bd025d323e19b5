"""Calls of each kind, run by another Python that has only its standard library and the wheel."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import hybridkv.native
from hybridkv.native import _cpu as extension


class MisuseError(Exception):
    """Raised by a ledger for an invalid call."""


def check_ledgers() -> None:
    answers, refusals = ("miss", "pending", "hit"), ("no room", "too large", "present", "closed")
    ledger = hybridkv.native.GranuleLedger(8, 4096, 8, 7, answers, refusals, tuple, MisuseError)
    assert ledger.reserve_all([(b"a", 5000), (b"b", 1 << 20)]) == [((0, 5000),), "too large"]
    assert ledger.commit_all([b"a"]) == [True] and ledger.lookup(b"a") == "hit"
    assert ledger.pin_all([b"a"]) == [((0, 5000),)] and ledger.pin_all([b"a", b"b"]) is None
    misuse = ""
    try:
        ledger.unpin(b"b")
    except MisuseError as error:
        misuse = str(error)
    assert misuse == "unpin: expected a pinned key, got 62"
    states = ("reserved", "committed", "doomed write", "doomed read")
    records = hybridkv.native.RecordLedger(64, 64, 8, 7, answers, refusals, states, tuple, MisuseError)
    assert records.why_not(b"a", 2) is None
    assert records.take(b"a", 100, 3 << 32 | 8192) == ((3 << 32 | 8192, 100),)
    assert records.commit_all([b"a"]) == ([(3 << 32 | 8192, 100, True)], True)
    assert records.find(b"a") == (b"a", 3 << 32 | 8192, 100, "committed", 0)
    assert records.walk(records.begin_walk(), 9) is not None


def check_copies() -> None:
    source = ctypes.create_string_buffer(b"bytes of a page", 4096)
    destination = ctypes.create_string_buffer(4096)
    hybridkv.native.copy_with_memcpy(ctypes.addressof(source), ctypes.addressof(destination), 4096)
    assert destination.raw == source.raw
    assert hybridkv.native.levels()[0] == "scalar"


check_ledgers()
check_copies()
print(f"{sys.version_info.major}.{sys.version_info.minor}", Path(extension.__file__).name)
