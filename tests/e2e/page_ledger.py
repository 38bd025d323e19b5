"""Checks every stored and every loaded page, over all tiers and sources.

It keeps several sets of digests per key, because a chunk may be stored more than once: two batches round differently,
and a slower tier may still hold the first version. A page from a tier must equal one version stored under its key. A
page copied from a block of the engine must equal that block, and the block must have the hash of the place to which it
is copied. Pages are read using the engine's description of its memory, never through hybridkv's views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from harness import Engine

from hybridkv.tiers.stack import Direction

LOCAL, RAM = "local", "ram"

Version = tuple[bytes, ...]
"""The digest of each block of a chunk."""


@dataclass(slots=True)
class PageLedger:
    """Attributes:
    stored: versions of each key, in the order in which they were stored.
    loaded: number of loaded pages by source: a tier's name, or `LOCAL`.
    earlier: of those, pages that equal an earlier version than the last one stored under their key.
    unstored: local pages that equal no version stored under their key.
    wrong: every loaded page that equals nothing that it may equal.
    loaded_keys: keys of which a page was loaded from a tier.
    failed_loads: loads that reported a failure; their pages are not compared.
    """

    engine: Engine
    stored: dict[bytes, list[Version]] = field(default_factory=dict)
    loaded: Counter[str] = field(default_factory=Counter)
    earlier: Counter[str] = field(default_factory=Counter)
    unstored: int = 0
    wrong: list[str] = field(default_factory=list)
    loaded_keys: set[bytes] = field(default_factory=set)
    failed_loads: int = 0
    _source: dict[bytes, str] = field(default_factory=dict)
    """The source of the bytes in host memory, by key."""
    _open: dict[str, list[tuple[Any, str, Version]]] = field(default_factory=dict)
    """Copies of each pending load, their source, and the digests of the source blocks."""

    def attach(self) -> PageLedger:
        """Watch the worker half of the connector from now on."""
        worker = self.engine.worker_connector._worker
        _call_first(worker, "start_stores", self._on_stores)
        _call_first(worker, "start_loads", self._on_loads)
        _call_first(worker, "start_moves", self._on_moves)
        results = worker.results

        def watched() -> Any:
            found = results()
            self._on_results(found)
            return found

        worker.results = watched
        return self

    @property
    def num_again(self) -> int:
        """Keys that were stored more than once."""
        return sum(len(versions) > 1 for versions in self.stored.values())

    @property
    def num_rewritten(self) -> int:
        """Keys with more than one version."""
        return sum(len(set(versions)) > 1 for versions in self.stored.values())

    def summary(self) -> str:
        return (
            f"{sum(self.loaded.values())} pages loaded ({dict(self.loaded)}), {len(self.wrong)} wrong; "
            f"{len(self.stored)} keys stored, {self.num_again} more than once, {self.num_rewritten} with other bytes; "
            f"{sum(self.earlier.values())} loaded pages of an earlier version ({dict(self.earlier)}); "
            f"{self.unstored} local pages equal no stored version; {self.failed_loads} failed loads"
        )

    def _digests(self, group_index: int, block_ids: Sequence[int]) -> Version:
        layers = self.engine.kv_cache_config.kv_cache_groups[group_index].layer_names
        digests = []
        for block_id in block_ids:
            digest = blake2b(digest_size=16)
            for layer in layers:
                digest.update(self.engine.page(layer, block_id).numpy())
            digests.append(digest.digest())
        return tuple(digests)

    def _on_stores(self, plan: Any) -> None:
        for store in plan.stores:
            for copy in store.copies:
                self.stored.setdefault(copy.key, []).append(self._digests(copy.group_index, copy.block_ids))
                self._source[copy.key] = RAM

    def _on_moves(self, plan: Any) -> None:
        for move in plan.moves:
            if move.direction is Direction.PROMOTE:
                self._source[move.key] = move.tier

    def _on_loads(self, plan: Any) -> None:
        for load in plan.loads:
            copies = self._open[load.request_id] = []
            for copy in load.copies if load.refused is None else ():
                if copy.local_blocks:
                    self._require_hashes(load.request_id, copy)
                source = LOCAL if copy.local_blocks else self._source[copy.key]
                copies.append((copy, source, self._digests(copy.group_index, copy.local_blocks)))

    def _require_hashes(self, request_id: str, copy: Any) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        manager, group = self.engine.scheduler.kv_cache_manager, copy.group_index
        hashes, table = self.engine.scheduler.requests[request_id].block_hashes, manager.get_block_ids(request_id)
        for block_id, source in zip(copy.block_ids, copy.local_blocks, strict=True):
            expected = make_block_hash_with_group_id(hashes[table[group].index(block_id)], group)
            if manager.block_pool.blocks[source].block_hash != expected:
                self.wrong.append(f"group {group}: local block {source} lacks the hash that block {block_id} needs")

    def _on_results(self, results: Any) -> None:
        for request_id in results.finished:
            copies = self._open.pop(request_id)
            if request_id in results.failed:
                self.failed_loads += 1
                continue
            for copy, source, digests in copies:
                self._compare(copy, source, digests)

    def _compare(self, copy: Any, source: str, local: Version) -> None:
        now = self._digests(copy.group_index, copy.block_ids)
        self.loaded[source] += len(now)
        part = slice(copy.first_block, copy.first_block + len(now))
        versions = [version[part] for version in self.stored.get(copy.key, [])]
        if source == LOCAL:
            self.unstored += 0 if now in versions else len(now)
            # A pinned block keeps its bytes until the load has ended.
            is_right = now == local == self._digests(copy.group_index, copy.local_blocks)
        else:
            self.loaded_keys.add(copy.key)
            is_right = now in versions
        if not is_right:
            self.wrong.append(f"group {copy.group_index}: blocks {copy.block_ids} from {source}, key {copy.key.hex()}")
        elif versions and now in versions and now != versions[-1]:
            self.earlier[source] += len(now)


def _call_first(owner: Any, name: str, hook: Callable[[Any], None]) -> None:
    inner = getattr(owner, name)

    def outer(plan: Any) -> None:
        hook(plan)
        inner(plan)

    setattr(owner, name, outer)
