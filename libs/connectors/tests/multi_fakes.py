"""Fake children of a Selector that answer as a test says, and the parts of an engine that a Selector reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from hybridkv.connectors.vllm.multi.children import Child
from hybridkv.connectors.vllm.multi.config import ChildConfig
from hybridkv.connectors.vllm.multi.selection import LoadSizes, Selector
from hybridkv.metrics import ChildSelection
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, LoadAdmission, Weight

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096


class Clock:
    """Clock that advances only when a test sets it."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeStore:
    """Child that answers `tokens`: a count, None, or an exception to raise."""

    tokens: Any = 0
    is_async: bool = True
    sources: dict[str, int] | None = None
    stores_only: bool = False
    told: list[tuple[str, int]] = field(default_factory=list)
    asked: int = 0
    planned: list[str] = field(default_factory=list)
    """Requests with stops that were planned without a lookup."""
    planning_error: Exception | None = None

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        self.asked += 1
        if isinstance(self.tokens, Exception):
            raise self.tokens
        return self.tokens, bool(self.tokens) and self.is_async

    def plan_without_lookup(self, request: Any, computed_tokens: int) -> None:
        self.planned.append(request.request_id)
        if self.planning_error is not None:
            raise self.planning_error

    def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
        self.told.append((request.request_id, num_tokens))

    def get_external_cache_hit_sources(self, request: Any, num_tokens: int) -> dict[str, int]:
        return {"host": num_tokens} if self.sources is None else self.sources


def new_request(name: str = "r", num_tokens: int = 160) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=num_tokens, skip_reading_prefix_cache=False)


def new_blocks(first_id: int = 1, count: int = 10) -> Any:
    blocks = [SimpleNamespace(block_id=first_id + i, is_null=False) for i in range(count)]
    return SimpleNamespace(blocks=(blocks,))


def scheduled(requests: list[Any], num_tokens: int = 0) -> Any:
    """Step that schedules these requests for the first time, `num_tokens` of each."""
    return SimpleNamespace(
        num_scheduled_tokens={request.request_id: num_tokens for request in requests},
        total_num_scheduled_tokens=num_tokens * len(requests),
        scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id) for request in requests],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_output_tokens=[]),
    )


def output(finished: set[str] | None = None, failed: set[str] | None = None, invalid: set[int] | None = None) -> Any:
    return KVConnectorOutput(
        finished_recving=finished, failed_recving=failed or set(), invalid_block_ids=invalid or set()
    )


class Bench:
    """Selector over fake stores."""

    def __init__(self, *stores: FakeStore, weights: list[Weight] | None = None, timeout_s: float = 1.0) -> None:
        self.stores = stores
        self.clock = Clock()
        self.counts: dict[str, ChildSelection] = {}
        spec = SimpleNamespace(block_size=BLOCK_TOKENS, unpadded_page_size_bytes=BLOCK_BYTES)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
        sizes = LoadSizes(SimpleNamespace(kv_cache_groups=[group], prefix_cacheable_group_ids=(0,)), 1)  # type: ignore[arg-type]
        admission = LoadAdmission(CacheSpec((GroupSpec(GroupKind.FULL, BLOCK_TOKENS),), BLOCK_TOKENS), 64)
        children = [
            Child(ChildConfig(f"s{i}", "FakeStore", (weights or [1.0] * len(stores))[i], {}), store, True)  # type: ignore[arg-type]
            for i, store in enumerate(stores)
        ]
        self.selector = Selector(children, timeout_s, sizes, admission, self.clock)

    def ask(self, request: Any) -> int | None:
        return self.selector.matched_tokens(request, 0)[0]

    def admit(self, request: Any) -> int | None:
        """Ask, and allocate blocks for the answer. Returns the position of the child that loads."""
        num_tokens = self.ask(request)
        assert num_tokens is not None
        self.selector.allocated(request, new_blocks(), num_tokens)
        return self.selector.chosen(request) if num_tokens else None

    def end_load(self, request: Any, *, took_s: float = 0.0, has_failed: bool = False) -> None:
        """End the asynchronous load of a request."""
        self.clock.now_s += took_s
        name = {request.request_id}
        self.selector.loads_reported(output(name, name if has_failed else set()))

    def total(self, position: int) -> ChildSelection:
        """All counts of a child so far."""
        if (stats := self.selector.take_stats()) is not None:
            for name, counts in stats.children.items():
                self.counts.setdefault(name, ChildSelection()).merge(counts)
        return self.counts.setdefault(f"s{position}", ChildSelection())
