"""Several connectors below one engine: which of them each is, and what they must share.

A child of HybridMultiConnector finds here what cannot travel in its configuration, where every key is the operator's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from hybridkv.connectors.vllm.steering import Steering
from hybridkv.planner import LoadAdmission


@dataclass(frozen=True, slots=True)
class Sibling:
    """Which of an engine's connectors one is.

    Args:
        number: among the children; 0 for one that stands alone.
        admission: of all children's loads, which wait for the same blocks; None for one that stands alone.
        steering: of all children's prefills, whose stops the engine reads in one place; None for one that stands alone.
    """

    number: int = 0
    admission: LoadAdmission | None = None
    steering: Steering | None = None


_ALONE = Sibling()
_sibling: ContextVar[Sibling] = ContextVar("hybridkv_sibling", default=_ALONE)


@contextmanager
def as_sibling(sibling: Sibling) -> Iterator[None]:
    """Connectors that are built inside are this one of several."""
    token = _sibling.set(sibling)
    try:
        yield
    finally:
        _sibling.reset(token)


def current_sibling() -> Sibling:
    """Which of several a connector that is being built is."""
    return _sibling.get()
