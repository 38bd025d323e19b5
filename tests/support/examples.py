"""How many examples a long hypothesis test tries: all in the full run, a quarter before a landing."""

from __future__ import annotations

import os


def examples(number: int) -> int:
    """Of `number`, how many are tried in this run."""
    return number if "HYBRIDKV_FULL" in os.environ else -(-number // 4)


__all__ = ["examples"]
