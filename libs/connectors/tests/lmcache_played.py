"""Scheduler half of HybridLMCacheConnector with a fake server that answers when the test says so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.identity.identification import Identity
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import LoadFailure, StepOutcome, StoreOutcome
from hybridkv.connectors.vllm.common.role import BOTH, Role
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.lmcache.load_tracker import LoadTracker
from hybridkv.connectors.vllm.lmcache.messages import LMCachePlan
from hybridkv.connectors.vllm.lmcache.scheduler import LMCacheScheduler, SchedulerParts
from hybridkv.connectors.vllm.lmcache.session_spec import page_groups
from hybridkv.connectors.vllm.lmcache.store_tracker import StoreTracker
from hybridkv.hashing import ChunkKeys, GroupFingerprint, LayerFingerprint
from hybridkv.lmcache.calls import CallAnswer, CallFailure, CallFailureReason
from hybridkv.lmcache.geometry import Geometry
from hybridkv.lmcache.keys import prefix_words
from hybridkv.lmcache.operations import LookupHandle, Prefix, PrefixHit
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, LoadAdmission

BLOCK, CHUNK = 8, 16
FULL = GroupSpec(GroupKind.FULL, BLOCK)
WINDOW = GroupSpec(GroupKind.WINDOW, BLOCK, window_tokens=12)
DRAFTER = GroupSpec(GroupKind.FULL, BLOCK, lookahead_tokens=BLOCK)
STATE = GroupSpec(GroupKind.RECURRENT, CHUNK)
POOL_BLOCKS = 4096
TIMEOUT_S = 2.0


@dataclass(slots=True)
class OpenLookup:
    """An open lookup."""

    prefix: Prefix
    session: str
    lookup: LookupHandle

    @property
    def num_chunks(self) -> int:
        return self.prefix.num_tokens // CHUNK


class FakeServer:
    """Fake of `Operations`: keeps each lookup open until the test sets its result."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.asked: list[OpenLookup] = []
        self.num_lookups = 0
        self.locked: dict[str, PrefixHit] = {}

    def lookup(self, prefix: Prefix) -> LookupHandle:
        self.num_lookups += 1
        lookup = LookupHandle(self._clock() + TIMEOUT_S, self.release)
        self.asked.append(OpenLookup(prefix, f"session {self.num_lookups}", lookup))
        return lookup

    def release(self, found: PrefixHit) -> None:
        """Releases a lock. Raises `KeyError` if it is not held."""
        assert self.locked.pop(found.session) == found

    def answer(self, num_chunks: int, which: int = 0) -> None:
        asked = self.asked.pop(which)
        found = PrefixHit(asked.prefix, None, min(num_chunks, asked.num_chunks), asked.session)
        if found.num_chunks:
            self.locked[asked.session] = found
        asked.lookup.end(CallAnswer(found))

    def fail(self, reason: CallFailureReason = CallFailureReason.LOST, which: int = 0) -> None:
        self.asked.pop(which).lookup.end(CallFailure(reason))


def layout_of(groups: Sequence[GroupSpec], world_size: int = 1) -> CacheLayout:
    spec = CacheSpec(tuple(groups), CHUNK)
    prints = tuple(
        GroupFingerprint(
            kind=group.kind,
            block_tokens=group.block_tokens,
            layers=(LayerFingerprint(name=f"layer{index}", page_bytes=64),),
            lookahead_tokens=group.lookahead_tokens,
        )
        for index, group in enumerate(groups)
    )
    layers = tuple((LayerLayout(f"layer{index}", 64),) for index in range(len(groups)))
    return CacheLayout(spec, layers, prints, BLOCK, "sha256", world_size)


def new_request(name: str, tokens: Sequence[int], **params: Any) -> Request:
    """Request with block hashes."""
    init_none_hash(_hash)
    hasher = get_request_block_hasher(BLOCK, _hash)
    return Request(name, list(tokens), SamplingParams(max_tokens=1000, **params), None, block_hasher=hasher)


def _hash(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


class FakeEngine:
    """Fake engine with a scheduler's half.

    Args:
        groups: groups of the model.
        kv_role: role of the connector.
        world_size: number of ranks; each reports the end of a store.
        max_chunks: maximum length of a load, in chunks.
        pool_blocks: blocks of the engine's pool.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec] = (FULL,),
        kv_role: Role = BOTH,
        world_size: int = 1,
        max_chunks: int = 64,
        pool_blocks: int = POOL_BLOCKS,
    ) -> None:
        self.layout = layout = layout_of(groups, world_size)
        self.now_s = 0.0
        self.server = FakeServer(self.clock)
        self.closed = 0
        self.separate: bool | None = True
        """Whether the server separates object groups; None without a server."""
        keys = ChunkKeys(layout.fingerprint({"model": "m"}), BLOCK)
        self.adapters = Adapters(keys, 0)
        self.metrics = ConnectorMetrics()
        self.admission = LoadAdmission(layout.spec, 1 << 20)
        room = LoadRoom(self.admission, self.clock)

        def ask(digests: Sequence[bytes]) -> LookupHandle:
            return self.server.lookup(Prefix("cache", world_size, prefix_words(digests, CHUNK)))

        self.load_tracker = LoadTracker(layout, ask, max_chunks, room, self.metrics, self.clock)
        geometry = Geometry(page_groups(layout), CHUNK)
        self.store_tracker = StoreTracker(
            layout, geometry, lambda: self.separate, self.load_tracker, self.adapters, self.metrics
        )
        self.half = LMCacheScheduler(
            layout,
            Identity(keys, self.adapters),
            (),
            SchedulerParts(self.load_tracker, self.store_tracker, room),
            kv_role,
            self.metrics,
            self.end,
        )
        self.pool = BlockPool(pool_blocks + 1, True, BLOCK)
        self.half.bind_block_pool(self.pool)
        self.tables: dict[str, list[list[KVCacheBlock]]] = {}

    def clock(self) -> float:
        return self.now_s

    def end(self) -> None:
        self.closed += 1

    def new_blocks(self, request: Request, num_tokens: int) -> Any:
        """Blocks that the engine allocates for `num_tokens`: the last one of a state, those that a window reaches."""
        table: list[list[KVCacheBlock]] = []
        for group in self.layout.spec.groups:
            count = -(-num_tokens // group.block_tokens)
            kept = count
            if group.kind is GroupKind.RECURRENT:
                kept = min(1, count)
            elif group.window_tokens:
                kept = min(count, -(-(group.window_tokens - 1) // group.block_tokens))
            table.append([self.pool.null_block] * (count - kept) + self.pool.get_new_blocks(kept))
        self.free(request)
        self.tables[request.request_id] = table
        return SimpleNamespace(blocks=tuple(table))

    def grow(self, request: Request, num_tokens: int) -> None:
        """Extends the blocks to `num_tokens` in total."""
        for group, table in zip(self.layout.spec.groups, self.tables[request.request_id], strict=True):
            more = -(-num_tokens // group.block_tokens) - len(table)
            table.extend(self.pool.get_new_blocks(max(0, more)))

    def states(self, request: Request, num_tokens: int) -> list[tuple[int, int, int]]:
        """States that the engine hands over after `num_tokens`: one for each recurrent group."""
        return [
            (index, self.tables[request.request_id][index][-1].block_id, num_tokens)
            for index, group in enumerate(self.layout.spec.groups)
            if group.kind is GroupKind.RECURRENT and self.tables[request.request_id][index]
        ]

    @property
    def room_is_idle(self) -> bool:
        """True if no request holds blocks for a load."""
        return self.admission.is_idle

    def free(self, request: Request) -> None:
        for group in self.tables.pop(request.request_id, ()):
            self.pool.free_blocks(block for block in reversed(group) if not block.is_null)

    def step(
        self,
        scheduled: Mapping[str, int] | None = None,
        *,
        preempted: Sequence[str] = (),
        finished: Sequence[str] = (),
        states: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
        synchronous: Mapping[str, int] | None = None,
        admitted: Mapping[str, int] | None = None,
    ) -> LMCachePlan:
        """The plan of one step. `synchronous`: requests with a load of another connector within the step, each with its
        computed tokens. `admitted`: other requests that start in the step, each with its computed tokens."""
        state = SimpleNamespace(
            boundary_state_offloads=dict(states or {}),
            resolve_block_ids=lambda name: [
                [0 if block.is_null else block.block_id for block in group] for group in self.tables[name]
            ],
        )
        output: Any = SimpleNamespace(
            num_scheduled_tokens=dict(scheduled or {}),
            preempted_req_ids=set(preempted),
            finished_req_ids=set(finished),
            kv_connector_block_state=state,
            has_sync_kv_loads=bool(synchronous),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=number)
                for name, number in {**(synchronous or {}), **(admitted or {})}.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], num_computed_tokens=[], resumed_req_ids=set(), new_block_ids=[]
            ),
        )
        return self.half.plan_step(output)

    def tell(
        self,
        stores: Mapping[int, StoreOutcome] | None = None,
        loaded: Sequence[str] = (),
        failures: Mapping[str, Sequence[LoadFailure]] | None = None,
        invalid_block_ids: Iterable[int] = (),
    ) -> None:
        """Reports results of all ranks."""
        said = {name: tuple(each) for name, each in (failures or {}).items()}
        outcome = StepOutcome(stores=dict(stores or {}), load_failures=said)
        output: Any = SimpleNamespace(
            kv_connector_worker_meta=outcome,
            finished_recving={*loaded, *said},
            failed_recving=set(said),
            invalid_block_ids=set(invalid_block_ids),
        )
        self.half.on_output(output)

    @property
    def num_pinned(self) -> int:
        """Number of blocks that are not free and belong to no request."""
        held = {block.block_id for table in self.tables.values() for group in table for block in group}
        return sum(block.ref_cnt > 0 and block.block_id not in held for block in self.pool.blocks[1:])
