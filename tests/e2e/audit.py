"""An independent check of every byte that leaves the engine and comes back.

It reads KV pages using the engine's description of its memory, never through hybridkv's views, when a store is
submitted and when a load has ended, and compares both by chunk key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Engine


@dataclass(slots=True)
class Audit:
    """The stored and restored pages. `mismatches` names every restored page that differs from the stored one.

    Attributes:
        child: the watched child of a multi connector; None: the connector itself.
        stored: the group and the pages, layer by layer, of each chunk key.
        loads: the request, the number of tokens and the failure of each load that has ended.
        compared_pages: how many restored pages were compared.
        restored_keys: group and key of every restored and compared chunk.
    """

    engine: Engine
    child: int | None = None
    stored: dict[bytes, tuple[int, list[list[torch.Tensor]]]] = field(default_factory=dict)
    loads: list[tuple[str, int, bool]] = field(default_factory=list)
    compared_pages: int = 0
    mismatches: list[str] = field(default_factory=list)
    restored_keys: list[tuple[int, bytes]] = field(default_factory=list)
    _open: dict[str, Any] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)

    def attach(self) -> Audit:
        """Watch the connector from now on."""
        worker = self._half(self.engine.worker_connector)._worker
        self._wrap(worker, "start_stores", before=self._on_stores)
        self._wrap(worker, "start_loads", before=self._on_loads)
        self._wrap(worker, "results", after=self._on_results)
        self._wrap(self._half(self.engine.connector), "update_state_after_alloc", before=self._on_allocated)
        return self

    def _half(self, connector: Any) -> Any:
        return connector if self.child is None else connector.sub_connectors[self.child]

    @property
    def restored_tokens(self) -> int:
        """Tokens of all loads without a failure."""
        return sum(num_tokens for _, num_tokens, failed in self.loads if not failed)

    @property
    def failed_loads(self) -> int:
        return sum(failed for _, _, failed in self.loads)

    def keys_of(self, group_index: int) -> list[bytes]:
        """Keys of a group in the order in which they were stored."""
        return [key for key, (group, _) in self.stored.items() if group == group_index]

    def forget(self) -> None:
        """Clear the counts but keep the stored pages."""
        self.loads.clear()
        self.mismatches.clear()
        self.restored_keys.clear()
        self.compared_pages = 0

    @staticmethod
    def _wrap(
        owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[[Any], None] | None = None
    ) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any) -> Any:
            if before is not None:
                before(*args)
            result = inner(*args)
            if after is not None:
                after(result)
            return result

        setattr(owner, name, outer)

    def _pages(self, group_index: int, block_ids: tuple[int, ...]) -> list[list[torch.Tensor]]:
        layers = self.engine.kv_cache_config.kv_cache_groups[group_index].layer_names
        return [[self.engine.page(layer, block_id) for block_id in block_ids] for layer in layers]

    def _on_stores(self, plan: Any) -> None:
        for store in plan.stores:
            for copy in store.copies:
                pages = self._pages(copy.group_index, copy.block_ids)
                self.stored[copy.key] = (copy.group_index, [[page.clone() for page in layer] for layer in pages])

    def _on_allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._asked[request.request_id] = num_external_tokens

    def _on_loads(self, plan: Any) -> None:
        self._open.update((load.request_id, load) for load in plan.loads)

    def _on_results(self, results: Any) -> None:
        for request_id in results.finished:
            load = self._open.pop(request_id)
            failed = request_id in results.failed
            self.loads.append((request_id, self._asked.pop(request_id), failed))
            if not failed:
                for copy in load.copies:
                    self._compare(copy)

    def _compare(self, copy: Any) -> None:
        group_index, expected = self.stored[copy.key]
        self.restored_keys.append((copy.group_index, copy.key))
        for layer, (now, then) in enumerate(zip(self._pages(copy.group_index, copy.block_ids), expected, strict=True)):
            for i, page in enumerate(now):
                self.compared_pages += 1
                if group_index != copy.group_index or not torch.equal(page, then[copy.first_block + i]):
                    self.mismatches.append(f"group {copy.group_index} layer {layer} block {copy.block_ids[i]}")


def stored_views(engine: Engine, key: bytes, child: int | None = None) -> Iterator[memoryview]:
    """The bytes that the tier (of a multi connector's child) holds for a key, writable. Their checksum is renewed
    afterwards.

    A test can corrupt bytes without a checksum failure, and so check its own comparison.
    """
    halves = engine.connector, engine.worker_connector
    scheduler, worker = halves if child is None else (half.sub_connectors[child] for half in halves)
    index, arena = scheduler._scheduler._stack.primary, worker._worker._arena
    slot = index.pin(key)
    assert slot is not None, "nothing is stored under this key"
    yield from arena.views(slot)
    assert arena.seal_all([(key, slot)]) == [None]
    index.unpin(key)
