"""What travels between the halves of HybridMultiConnector: what its children send, one beside the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(slots=True)
class MultiMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step.

    Args:
        children: each child's own.
        saving: requests that ended, and the children that still read their blocks.
        step: counts the steps.
        is_measured: whether the workers shall say when the step has ended.
        sync_children: children that load in this step before its forward pass, which is timed.
    """

    children: tuple[KVConnectorMetadata, ...]
    saving: dict[str, frozenset[int]] = field(default_factory=dict)
    step: int = 0
    is_measured: bool = False
    sync_children: frozenset[int] = frozenset()


@dataclass(slots=True)
class MultiWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: each child's own, the step that ended, and the seconds of loads within it by child."""

    children: tuple[KVConnectorWorkerMetadata | None, ...]
    step: int | None = None
    sync_load_seconds: dict[int, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiWorkerMetadata:
        """Of seconds the slowest rank's count: the others wait for it."""
        if not isinstance(other, MultiWorkerMetadata) or len(other.children) != len(self.children):
            raise TypeError(f"expected MultiWorkerMetadata of {len(self.children)} children, got {other!r}")
        children = []
        for mine, theirs in zip(self.children, other.children, strict=True):
            children.append(mine.aggregate(theirs) if mine is not None and theirs is not None else mine or theirs)
        steps = [step for step in (self.step, other.step) if step is not None]
        seconds = dict(self.sync_load_seconds)
        for child, more in other.sync_load_seconds.items():
            seconds[child] = max(more, seconds.get(child, 0.0))
        return MultiWorkerMetadata(tuple(children), max(steps, default=None), seconds)


@dataclass(slots=True)
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's handshake metadata, by child."""

    children: dict[int, KVConnectorHandshakeMetadata]


def of_child(metadata: Mapping[Any, KVConnectorHandshakeMetadata], child: int) -> dict[Any, Any]:
    """What each rank's child says, by rank. What is no MultiHandshakeMetadata is meant for everyone."""
    found = {}
    for rank, each in metadata.items():
        if not isinstance(each, MultiHandshakeMetadata):
            found[rank] = each
        elif child in each.children:
            found[rank] = each.children[child]
    return found


class MultiKVEvents(KVConnectorKVEvents):
    """KV events of one rank's children, kept apart, merged over ranks child by child."""

    def __init__(self, children: dict[int, KVConnectorKVEvents]) -> None:
        self.children = children
        self._num_workers = 1

    def add_events(self, events: list[Any]) -> None:
        """Takes what another rank's `get_all_events` gave."""
        for child, theirs in events:
            mine = self.children.get(child)
            if mine is None:
                self.children[child] = theirs
            else:
                mine.add_events(theirs.get_all_events())
                mine.increment_workers(1)

    def aggregate(self) -> MultiKVEvents:
        for child, events in self.children.items():
            self.children[child] = events.aggregate()
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._num_workers += count

    def get_all_events(self) -> list[Any]:
        """Pairs of a child and its events."""
        return list(self.children.items())

    def get_number_of_workers(self) -> int:
        return self._num_workers

    def clear_events(self) -> None:
        for events in self.children.values():
            events.clear_events()
