"""Messages between the halves of HybridMultiConnector: containers of the children's messages."""

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
    """Message from scheduler to workers, once a step.

    Args:
        children: metadata of each child.
        stores_in_flight: requests that ended since the last step, and the children that still read their blocks.
        step: number of the step.
        is_measured: whether workers must report the end of the step.
        sync_children: children that load in this step before its forward pass. Workers time these loads.
    """

    children: tuple[KVConnectorMetadata, ...]
    stores_in_flight: dict[str, frozenset[int]] = field(default_factory=dict)
    step: int = 0
    is_measured: bool = False
    sync_children: frozenset[int] = frozenset()


@dataclass(slots=True)
class MultiWorkerMetadata(KVConnectorWorkerMetadata):
    """Message from workers to scheduler: each child's metadata, the ended step, and seconds of sync loads by child."""

    children: tuple[KVConnectorWorkerMetadata | None, ...]
    step: int | None = None
    sync_load_seconds: dict[int, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiWorkerMetadata:
        """Merges two ranks. Takes the maximum of the seconds, because all ranks wait for the slowest."""
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
    """Handshake metadata of one rank, by child."""

    children: dict[int, KVConnectorHandshakeMetadata]


def of_child(metadata: Mapping[Any, KVConnectorHandshakeMetadata], child: int) -> dict[Any, Any]:
    """Handshake metadata of one child, by rank. Metadata of another type goes to every child."""
    found = {}
    for rank, each in metadata.items():
        if not isinstance(each, MultiHandshakeMetadata):
            found[rank] = each
        elif child in each.children:
            found[rank] = each.children[child]
    return found


class MultiKVEvents(KVConnectorKVEvents):
    """KV events of one rank, by child. Merges ranks child by child."""

    def __init__(self, children: dict[int, KVConnectorKVEvents]) -> None:
        self.children = children
        self._num_workers = 1

    def add_events(self, events: list[Any]) -> None:
        """Adds the result of another rank's `get_all_events`."""
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
        """Pairs of a child's position and its events."""
        return list(self.children.items())

    def get_number_of_workers(self) -> int:
        return self._num_workers

    def clear_events(self) -> None:
        for events in self.children.values():
            events.clear_events()
