"""Reduces long tests: all cases in the full run, a part of them before a landing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def examples(number: int, share: int = 4) -> int:
    """The number of examples to try in this run: all in the full run, otherwise one in `share`."""
    return number if "HYBRIDKV_FULL" in os.environ else -(-number // share)


def thinned(items: Sequence[T], share: int, first: int = 0) -> Sequence[T]:
    """The items to try in this run: all in the full run, otherwise one in `share`, beginning with number `first`."""
    return items if "HYBRIDKV_FULL" in os.environ else items[first::share]


__all__ = ["examples", "thinned"]
