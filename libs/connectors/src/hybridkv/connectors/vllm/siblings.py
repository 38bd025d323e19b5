"""Several HybridOffloadConnectors below one engine: which place each has among the children of HybridMultiConnector.

A place cannot travel in a child's configuration, where every key is the operator's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_place: ContextVar[int] = ContextVar("hybridkv_place", default=0)


@contextmanager
def at_place(place: int) -> Iterator[None]:
    """Connectors that are built inside are children at this place."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def current_place() -> int:
    """The place of a connector that is being built; 0 outside of HybridMultiConnector."""
    return _place.get()
