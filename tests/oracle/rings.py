"""Mixes and ways of loading that a test plays before a landing. The full run plays all of them.

Tests of offload alone, of the engine's own cache and of peers play all mixes before a landing too.
"""

from __future__ import annotations

from typing import Final

import pytest

from oracle.mixes import GEMMA3, NAMED, QWEN3_NEXT

MIXES: Final = [mix if mix in (GEMMA3, QWEN3_NEXT) else pytest.param(mix, marks=pytest.mark.full) for mix in NAMED]
LOADS: Final = ["async", pytest.param("sync", marks=pytest.mark.full)]
