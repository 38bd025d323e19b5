"""The counterpart of `audit.py` for engines on an LMCache server: pages are named by their place in a prefix, not by a
key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from audit import Audit
from harness import Engine, make_prompt
from lmcache_site import LMCacheSite

from hybridkv.lmcache.connection import Ready
from kits.lmcache.server_process import eventually

PageName: TypeAlias = tuple[bytes, int, int]
"""The digest of a chunk, a group of the engine, and a block of the chunk."""
Tamper: TypeAlias = Callable[[PageName, list[torch.Tensor]], None]
"""Changes a restored page, layer by layer, before it is used."""


@dataclass(slots=True)
class LMCacheAudit(Audit):
    """The audit of an engine on an LMCache server.

    Attributes:
        pages: the stored pages, layer by layer.
        tamper: changes each restored page before it is compared.
        restored: the pages written by each load without a failure.
    """

    pages: dict[PageName, list[torch.Tensor]] = field(default_factory=dict)
    tamper: Tamper | None = None
    restored: list[set[PageName]] = field(default_factory=list)

    def forget(self) -> None:
        Audit.forget(self)
        self.restored.clear()

    def restored_groups(self) -> set[int]:
        """Groups with restored pages."""
        return {group for places in self.restored for _, group, _ in places}

    def _on_stores(self, plan: Any) -> None:
        for store in plan.stores:
            for place, pages in self._places(store):
                self.pages[place] = [page.clone() for page in pages]

    def _on_results(self, results: Any) -> None:
        for request_id in results.finished:
            load = self._open.pop(request_id)
            failed = request_id in results.failed
            self.loads.append((request_id, self._asked.pop(request_id), failed))
            if not failed:
                self.restored.append({self._compared(place, pages) for place, pages in self._places(load)})

    def _places(self, work: Any) -> list[tuple[PageName, list[torch.Tensor]]]:
        """The pages of a load or store as they are in the engine's memory."""
        return [
            ((work.digests[copy.chunk], copy.group_index, copy.first_block + number), self._layers(copy, block_id))
            for copy in work.copies
            for number, block_id in enumerate(copy.block_ids)
        ]

    def _layers(self, copy: Any, block_id: int) -> list[torch.Tensor]:
        return [layer[0] for layer in self._pages(copy.group_index, (block_id,))]

    def _compared(self, place: PageName, now: list[torch.Tensor]) -> PageName:
        if self.tamper is not None:
            self.tamper(place, now)
        for number, (page, then) in enumerate(zip(now, self.pages[place], strict=True)):
            self.compared_pages += 1
            if not torch.equal(page, then):
                self.mismatches.append(f"group {place[1]} layer {number} block {place[2]}")
        return place


def may_ask(engine: Engine, child: int | None = None) -> bool:
    """Whether the scheduler's half has found the server. Earlier requests are computed."""
    connector = engine.connector if child is None else engine.connector.sub_connectors[child]
    return isinstance(connector._scheduler_builder.connection.state, Ready)


def num_pages_under_way(worker: Any) -> int:
    """The number of pages of a worker that the server, or a copy, may still access."""
    taken: int = worker._session._registration.pool.num_taken
    return taken


@dataclass(frozen=True, slots=True)
class Link:
    """An engine's connector, and its server.

    Attributes:
        child: the child of a multi connector; None: the connector itself.
    """

    engine: Engine
    site: LMCacheSite
    child: int | None = None

    @property
    def scheduler(self) -> Any:
        """The half in the scheduler."""
        return self._half(self.engine.connector)._scheduler

    @property
    def worker(self) -> Any:
        """The half in the worker."""
        return self._half(self.engine.worker_connector)._worker

    @property
    def states(self) -> tuple[bool, bool]:
        """Whether each half may send requests to the server."""
        session = self.worker._session
        return may_ask(self.engine, self.child), session is not None and session.ready is not None

    @property
    def num_pages_under_way(self) -> int:
        """The number of pages that the server, or a copy, may still access."""
        return num_pages_under_way(self.worker)

    def require_up(self) -> None:
        """Wait until both halves may send requests to the current server. The worker connects with the first step."""
        if self.worker._session is None:
            self.engine.generate([make_prompt(1, seed=0)])
        assert eventually(lambda: all(self.states) and self._is_known()), "the server was not found again"

    def _is_known(self) -> bool:
        """Whether the server knows both halves; it may not yet have noticed the end of killed ones."""
        status = self.site.server.status()
        known = {*status["registered_gpu_ids"], *status["registered_non_cuda_instance_ids"]}
        connections = (self._half(self.engine.connector)._scheduler_builder.connection, self.worker._session.connection)
        registrations = [state.registration for each in connections if (state := each.ready) is not None]
        return len(registrations) == 2 and {each.instance for each in registrations if each is not None} <= known

    def require_down(self) -> None:
        """Wait until both halves know that the server is unavailable."""
        assert eventually(lambda: not any(self.states)), "the failure was not noticed"

    def settle(self) -> None:
        """Wait until stores can be read and are on the server's disk. The engine is idle meanwhile."""
        self.engine.drain()
        assert eventually(lambda: not self.num_pages_under_way), "a store has no answer"
        assert eventually(self.site.is_quiet), self.site.server.status()

    def _half(self, connector: Any) -> Any:
        return connector if self.child is None else connector.sub_connectors[self.child]
