"""Worker half of HybridMultiConnector: forwards each call to every child and combines the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.multi.children import Child
from hybridkv.connectors.vllm.multi.messages import (
    MultiHandshakeMetadata,
    MultiKVEvents,
    MultiMetadata,
    MultiWorkerMetadata,
)


class SyncLoadTimer:
    """Measures the time of synchronous loads, by child.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timed: frozenset[int] = frozenset()
        self._seconds: dict[int, float] = {}

    def begin(self, children: frozenset[int]) -> None:
        """Starts a step with synchronous loads of these children."""
        self._timed = children

    def run(self, child: int, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Calls a child, and measures the call if the child loads in this step."""
        if child not in self._timed:
            call(*args, **options)
            return
        started_s = self._clock()
        call(*args, **options)
        self._seconds[child] = self._seconds.get(child, 0.0) + self._clock() - started_s

    def take(self) -> dict[int, float]:
        """Returns and resets the seconds, by child."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class SchedulerStoresInFlight:
    """Ended requests with blocks that children still read, until `take` passes them to the workers."""

    def __init__(self) -> None:
        self._tails: dict[str, set[int]] = {}
        self._ended: dict[str, frozenset[int]] = {}

    def tail_accepted(self, request_id: str, children: Iterable[int]) -> None:
        """Adds children that read a partial block of a request that is about to end."""
        self._tails.setdefault(request_id, set()).update(children)

    def request_ended(self, request_id: str, children: Iterable[int]) -> bool:
        """Adds children that read blocks of an ended request. Returns whether any child reads blocks of the request."""
        reading = frozenset(self._tails.pop(request_id, set())).union(children)
        if reading:
            self._ended[request_id] = reading
        return bool(reading)

    def take(self) -> dict[str, frozenset[int]]:
        """Returns the requests that ended since the last call and the children that read their blocks."""
        ended, self._ended = self._ended, {}
        return ended


class WorkerStoresInFlight:
    """Ended requests with blocks that children still read, on one rank."""

    def __init__(self) -> None:
        self._reading: dict[str, set[int]] = {}

    def begin(self, stores: Mapping[str, frozenset[int]]) -> None:
        """Adds ended requests and the children that still read their blocks."""
        for request_id, children in stores.items():
            self._reading.setdefault(request_id, set()).update(children)

    def end(self, child: int, request_ids: Iterable[str]) -> set[str]:
        """Handles requests whose blocks a child no longer reads. Returns the requests whose blocks no child reads any
        more. Ignores unknown ids."""
        done = set()
        for request_id in request_ids:
            reading = self._reading.get(request_id)
            if reading is None or child not in reading:
                continue
            reading.discard(child)
            if not reading:
                del self._reading[request_id]
                done.add(request_id)
        return done


class MultiWorkerSide(KVConnectorBase_V1):
    """Methods that vLLM calls in a worker. `_set_children` must be called first."""

    def _set_children(self, children: Sequence[Child]) -> None:
        self._children = tuple(children)
        self._connectors = [child.connector for child in children]
        self._worker_stores = WorkerStoresInFlight()
        self._timer = SyncLoadTimer(time.monotonic)

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        found = [(child.name, child.connector.get_mem_pool_context()) for child in self._children]
        pools = [(name, context) for name, context in found if context is not None]
        if len(pools) > 1:
            raise ConfigurationError(
                f"{ROOT}.connectors",
                "at most one child with its own memory pool",
                ", ".join(name for name, _ in pools),
                "the engine allocates the KV cache once; turn the pool off in all other children",
            )
        return pools[0][1] if pools else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for each in self._connectors:
            each.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Prepares every child for the unmapping of the KV cache. If one cannot, prepares none and raises its error."""
        for position, each in enumerate(self._connectors):
            try:
                compat.unregister_kv_caches(each)
            except Exception:
                for prepared in self._connectors[:position]:
                    compat.restore_kv_caches(prepared)
                raise

    def restore_kv_caches(self) -> None:
        for each in self._connectors:
            compat.restore_kv_caches(each)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        for each in self._connectors:
            each.set_host_xfer_buffer_ops(copy_operation)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        metadata = _as_multi_metadata(connector_metadata)
        super().bind_connector_metadata(metadata)
        self._worker_stores.begin(metadata.stores_in_flight)
        self._timer.begin(metadata.sync_children)
        for each, child_metadata in zip(self._connectors, metadata.children, strict=True):
            each.bind_connector_metadata(child_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for each in self._connectors:
            each.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata | set[str]) -> None:
        """Takes the step's metadata, or the set of request ids that vLLM before 0.18 passes."""
        if isinstance(kv_connector_metadata, MultiMetadata):
            for each, child_metadata in zip(self._connectors, kv_connector_metadata.children, strict=True):
                each.handle_preemptions(child_metadata)
        else:
            for each in self._connectors:
                each.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for position, each in enumerate(self._connectors):
            self._timer.run(position, each.start_load_kv, forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for position, each in enumerate(self._connectors):
            self._timer.run(position, each.wait_for_layer_load, layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for each in self._connectors:
            each.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def finish_forward(self) -> None:
        for each in self._connectors:
            each.finish_forward()

    def reset_capture_state(self) -> None:
        for each in self._connectors:
            each.reset_capture_state()

    def wait_for_save(self) -> None:
        for each in self._connectors:
            each.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        combined = KVConnectorTransferResults()
        for position, each in enumerate(self._connectors):
            results = each.get_transfer_results(finished_req_ids)
            combined.finished_recving |= results.finished_recving
            combined.failed_recving |= results.failed_recving
            combined.finished_sending |= self._worker_stores.end(position, results.finished_sending)
        return combined

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set[int]().union(*(each.get_block_ids_with_load_errors() for each in self._connectors))

    def get_kv_connector_kv_cache_events(self) -> MultiKVEvents | None:
        events = {i: each.get_kv_connector_kv_cache_events() for i, each in enumerate(self._connectors)}
        found = {position: of_child for position, of_child in events.items() if of_child is not None}
        return MultiKVEvents(found) if found else None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        metadata = {i: each.get_handshake_metadata() for i, each in enumerate(self._connectors)}
        found = {position: of_child for position, of_child in metadata.items() if of_child is not None}
        return MultiHandshakeMetadata(found) if found else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        children = tuple(each.build_connector_worker_meta() for each in self._connectors)
        metadata = self._connector_metadata
        measured = metadata if isinstance(metadata, MultiMetadata) and metadata.is_measured else None
        if measured is None and not any(of_child is not None for of_child in children):
            return None
        return MultiWorkerMetadata(children, measured.step if measured else None, self._timer.take())


def _as_multi_metadata(metadata: KVConnectorMetadata) -> MultiMetadata:
    if not isinstance(metadata, MultiMetadata):
        raise TypeError(f"expected MultiMetadata, got {type(metadata).__name__}")
    return metadata
