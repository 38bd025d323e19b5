"""Sequences of buffers as one run of bytes. Private to the tiers of this library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


def byte_views(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Each buffer as bytes. `TypeError` when one is not C-contiguous or no buffer at all."""
    return [memoryview(buffer).cast("B") for buffer in buffers]
