"""Ranks without an engine: a worker of HybridLMCacheConnector over plain tensors, with its plans and their results."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import patience
import torch

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyPaths
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import LoadFailure, StoreOutcome
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.lmcache.config import LMCacheConfig
from hybridkv.connectors.vllm.lmcache.messages import LMCachePlan, PageCopy, PageLoad, PageStore, StoreRelease
from hybridkv.connectors.vllm.lmcache.session import RankSession
from hybridkv.connectors.vllm.lmcache.session_spec import SessionSpec, num_chunks, page_groups, session_spec_of
from hybridkv.connectors.vllm.lmcache.worker import LMCacheWorker
from hybridkv.lmcache.calls import CallAnswer, CallResult
from hybridkv.lmcache.connection import ConnectionOptions, ServerAddress
from hybridkv.lmcache.geometry import Geometry
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec
from hybridkv.transfer import CpuCopyEngine
from kits.lmcache.rig import needed_blocks, wait
from kits.lmcache.server_process import eventually

FULL, WINDOW, RECURRENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.RECURRENT
WAIT_S = patience.seconds(12.0)
_SEEDS = itertools.count()
POOL_BYTES = 4 << 20


class Model(NamedTuple):
    """Groups, and the bytes of a block in each of their layers. Stored bytes are padded to whole words."""

    groups: tuple[GroupSpec, ...]
    layers: tuple[tuple[int, ...], ...]
    chunk_tokens: int = 256


GEMMA = Model(
    (GroupSpec(FULL, 16), GroupSpec(WINDOW, 16, window_tokens=128), GroupSpec(WINDOW, 16, window_tokens=1024)),
    ((96, 100), (80,), (64, 33)),
)
QWEN3_NEXT = Model((GroupSpec(RECURRENT, 256), GroupSpec(FULL, 16)), ((3001, 500), (112, 112)))
DEEPSEEK_V4 = Model(
    (
        GroupSpec(FULL, 256),
        GroupSpec(WINDOW, 64, window_tokens=128),
        GroupSpec(WINDOW, 64, window_tokens=128),
        GroupSpec(FULL, 4),
        GroupSpec(FULL, 8),
    ),
    ((4096,), (1000,), (1000,), (72,), (136,)),
)
MODELS = {"gemma": GEMMA, "qwen3-next": QWEN3_NEXT, "deepseek-v4": DEEPSEEK_V4}


def layout_of(model: Model, world_size: int = 1) -> CacheLayout:
    layers = tuple(
        tuple(LayerLayout(f"{group}.{layer}", size) for layer, size in enumerate(sizes))
        for group, sizes in enumerate(model.layers)
    )
    return CacheLayout(CacheSpec(model.groups, model.chunk_tokens), layers, (), 16, "sha256", world_size)


def pool_of(model: Model, chunks: int) -> int:
    """Smallest size in bytes of a pool for this many chunks."""
    groups = page_groups(layout_of(model))
    return bisect.bisect_left(
        range(64 * POOL_BYTES), chunks, key=lambda size: num_chunks(groups, model.chunk_tokens, size)
    )


def digests_of(seed: object, num_chunks: int) -> tuple[bytes, ...]:
    """One digest for each chunk, over all tokens up to its end."""
    chain, digest = [], repr(seed).encode()
    for _ in range(num_chunks):
        digest = hashlib.blake2b(digest, digest_size=32).digest()
        chain.append(digest)
    return tuple(chain)


Tables = Mapping[int, Sequence[int]]
"""Blocks of each group, from token 0."""


@dataclass(slots=True)
class PlanResults:
    """Results of a plan."""

    finished: set[str]
    failed: set[str]
    stores: dict[int, StoreOutcome]
    failures: dict[str, tuple[LoadFailure, ...]]


class Rank:
    """One worker, and the memory of its engine.

    Args:
        model: model of the engine.
        address: address of the server.
        namespace: namespace of the cache.
        keys: `rank`, `world_size`, `pool`, `num_blocks`, `clock`, `load_timeout_s`, `connection`,
            `engine`, and those of the configuration.
    """

    def __init__(self, model: Model, address: ServerAddress, namespace: bytes, **keys: Any) -> None:
        self.model = model
        self.namespace = namespace
        self.rank = keys.pop("rank", 0)
        world_size = keys.pop("world_size", 1)
        self.num_blocks = keys.pop("num_blocks", 0) or 24 * max(self.blocks_per_chunk) + 8
        clock: Callable[[], float] = keys.pop("clock", time.monotonic)
        load_timeout_s = keys.pop("load_timeout_s", WAIT_S)
        self.engine: CpuCopyEngine = keys.pop("engine", None) or CpuCopyEngine()
        calm = ConnectionOptions(call_timeout_s=patience.seconds(1.0), beat_s=0.5, retry_s=0.1)
        connection = keys.pop("connection", calm)
        self.layout = layout_of(model, world_size)
        url = f"tcp://{address.host}:{address.port}"
        known = {"pool": POOL_BYTES * world_size, "store_timeout_seconds": WAIT_S, **keys}
        config = LMCacheConfig(url=url, http_port=address.http_port, **known)
        self.session_spec: SessionSpec = replace(session_spec_of(config, self.layout), connection=connection)
        self.metrics = ConnectorMetrics()
        paths = CopyPaths(self.engine, self.engine, load_timeout_s, clock)
        self.worker = LMCacheWorker(self.layout, self.rank, self.session_spec, paths, self.metrics)
        self.caches = self._tensors()
        self.worker.register(self.caches, self.num_blocks)
        self._store_ids = 0

    def _tensors(self) -> dict[str, torch.Tensor]:
        """KV memory filled with a poison value. Blocks of the first layer are not adjacent."""
        generator = torch.Generator().manual_seed(next(_SEEDS))
        caches = {}
        for group, sizes in enumerate(self.model.layers):
            for layer, size in enumerate(sizes):
                padded = torch.randint(0, 256, (self.num_blocks, size + 7), dtype=torch.uint8, generator=generator)
                caches[f"{group}.{layer}"] = padded[:, :size] if layer == 0 else padded[:, :size].contiguous()
        return caches

    @property
    def blocks_per_chunk(self) -> tuple[int, ...]:
        return tuple(self.model.chunk_tokens // group.block_tokens for group in self.model.groups)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.session_spec.groups, self.session_spec.chunk_tokens)

    @property
    def session(self) -> RankSession:
        session = self.worker._session
        assert session is not None
        return session

    def tables(self, seed: int, num_chunks: int) -> dict[int, list[int]]:
        """Blocks for a prompt, scattered; none is the null block."""
        chance = random.Random(seed)
        return {
            group: chance.sample(range(1, self.num_blocks), blocks * num_chunks)
            for group, blocks in enumerate(self.blocks_per_chunk)
        }

    def fill(self, tables: Tables, seed: int) -> None:
        """Fills each block with unique bytes, by its position in the prompt."""
        for group, sizes in enumerate(self.model.layers):
            for layer, size in enumerate(sizes):
                chance = random.Random(f"{seed} {self.rank} {group} {layer}")
                for block in tables[group]:
                    self.caches[f"{group}.{layer}"][block] = torch.frombuffer(
                        bytearray(chance.randbytes(size)), dtype=torch.uint8
                    )

    def block(self, group: int, block: int) -> bytes:
        """Bytes of one block, layer after layer."""
        sizes = range(len(self.model.layers[group]))
        return b"".join(self.caches[f"{group}.{layer}"][block].numpy().tobytes() for layer in sizes)

    def everything(self) -> dict[tuple[int, int], bytes]:
        """Bytes of every block of every group."""
        groups = range(len(self.model.groups))
        return {(group, block): self.block(group, block) for group in groups for block in range(self.num_blocks)}

    # Plans.

    def store_of(
        self, digests: Sequence[bytes], tables: Tables, start_chunk: int = 0, states_at: Sequence[int] | None = None
    ) -> PageStore:
        """All copies of the chunks; states only after the given numbers of chunks, if given."""
        self._store_ids += 1
        copies = []
        for chunk in range(start_chunk, len(digests)):
            for group, blocks in enumerate(self.blocks_per_chunk):
                is_state = self.model.groups[group].kind is RECURRENT
                if is_state and states_at is not None and chunk + 1 not in states_at:
                    continue
                copies.append(PageCopy(group, chunk, 0, tuple(tables[group][chunk * blocks : (chunk + 1) * blocks])))
        return PageStore(self._store_ids, tuple(digests), start_chunk, tuple(copies))

    def needed(self, num_chunks: int, start_chunk: int = 0) -> dict[int, list[int]]:
        """Positions of the blocks that a resume after this many chunks needs, by group."""
        return {
            group: [
                at
                for at in needed_blocks(self.geometry, group, num_chunks)
                if at >= start_chunk * self.blocks_per_chunk[group]
            ]
            for group in range(len(self.model.groups))
        }

    def load_of(self, request_id: str, digests: Sequence[bytes], tables: Tables, start_chunk: int = 0) -> PageLoad:
        """Load for a resume after the last chunk."""
        copies = []
        for group, positions in self.needed(len(digests), start_chunk).items():
            blocks = self.blocks_per_chunk[group]
            for chunk in sorted({at // blocks for at in positions}):
                here = [at for at in positions if at // blocks == chunk]
                assert here == list(range(here[0], here[-1] + 1))
                ids = tuple(tables[group][at] for at in here)
                copies.append(PageCopy(group, chunk, here[0] % blocks, ids))
        return PageLoad(request_id, tuple(digests), start_chunk, tuple(copies))

    # Actions of a test.

    def begin(
        self,
        *,
        loads: Sequence[PageLoad] = (),
        stores: Sequence[PageStore] = (),
        releases: Sequence[StoreRelease] = (),
    ) -> None:
        plan = LMCachePlan(tuple(loads), tuple(stores), self.namespace, releases=tuple(releases))
        self.worker.start_loads(plan)
        self.worker.start_stores(plan)

    def run(self, *, loads: Sequence[PageLoad] = (), stores: Sequence[PageStore] = ()) -> PlanResults:
        """Runs loads and stores to their end."""
        self.begin(loads=loads, stores=stores)
        return self.finish(len(loads), len(stores))

    def finish(self, num_loads: int, num_stores: int) -> PlanResults:
        """Step until this many loads and stores have ended."""
        ended = PlanResults(set(), set(), {}, {})

        def is_over() -> bool:
            results = self.worker.results()
            ended.finished |= results.finished
            ended.failed |= results.failed
            outcome = self.worker.outcome()
            if outcome is not None:
                ended.stores |= outcome.stores
                ended.failures |= outcome.load_failures
            return len(ended.finished) >= num_loads and len(ended.stores) >= num_stores

        assert eventually(is_over, WAIT_S), ended
        return ended

    def store(self, digests: Sequence[bytes], tables: Tables, **keys: Any) -> None:
        """Stores, and returns when the prefix is readable."""
        [outcome] = self.run(stores=[self.store_of(digests, tables, **keys)]).stores.values()
        assert outcome == StoreOutcome(1), outcome
        assert self.is_readable(digests)

    def is_readable(self, digests: Sequence[bytes], timeout_s: float = WAIT_S) -> bool:
        """True if this rank's part of the whole prefix is readable, now or soon."""
        session = self.session
        ended: CallResult[None] = wait(
            lambda end: session.operations.confirm(session.prefix(digests), self.rank, timeout_s, end)
        )
        return ended == CallAnswer(None)

    def all_pages_are_free(self) -> bool:
        """Wait until all pages of the pool are free; False after the timeout."""

        def is_free() -> bool:
            self.worker.results()
            return self.session.used_bytes == 0

        are_free = eventually(is_free, WAIT_S)
        self.worker.results()  # counts operations that ended after the last call
        return are_free

    def counted(self) -> dict[str, float]:
        """Counts since the last call, by name and labels."""
        stats = self.metrics.take()
        if stats is None:
            return {}
        numbers = [*stats.data["counters"], *stats.data["gauges"]]
        return {" ".join((name.removeprefix("vllm:hybridkv_"), *labels)): value for name, labels, value in numbers}

    def close(self) -> None:
        self.worker.close()


def loaded(rank: Rank, tables: Tables, positions: Mapping[int, Sequence[int]]) -> dict[tuple[int, int], bytes]:
    """Bytes by group and position in the prompt."""
    return {(group, at): rank.block(group, tables[group][at]) for group, each in positions.items() for at in each}
