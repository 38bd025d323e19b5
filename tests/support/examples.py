"""How much of a long test runs: all in the full run, a part before a landing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def examples(number: int, share: int = 4) -> int:
    """Of `number` examples, how many are tried in this run: one in `share` before a landing."""
    return number if "HYBRIDKV_FULL" in os.environ else -(-number // share)


def thinned(items: Sequence[T], share: int, first: int = 0) -> Sequence[T]:
    """Of `items`, those that are tried in this run: one in `share` before a landing, from number `first` on."""
    return items if "HYBRIDKV_FULL" in os.environ else items[first::share]


__all__ = ["examples", "thinned"]
