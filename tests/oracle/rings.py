"""Mixes and ways of loading that a test runs before a landing. The full run uses all of them.

Tests of offload alone and of peers use all mixes before a landing too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pytest

from oracle.mixes import GEMMA3, NAMED, QWEN3_NEXT

LOADS: Final = ["async", pytest.param("sync", marks=pytest.mark.full)]


def but_full(cases: Iterable[Any], *first: Any) -> list[Any]:
    """Marks all these cases except `first` for the full run. A case of several values is a tuple."""
    values = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [case if case in first else pytest.param(*value, marks=pytest.mark.full) for case, value in values]


MIXES: Final = but_full(NAMED, GEMMA3, QWEN3_NEXT)
