"""Small correct connector with injectable faults: the test subject of the oracle itself.

It stores whole blocks by (group, prefix hash) in a dict that both roles share. It is no model of a good connector:
stores are synchronous, nothing is evicted. Each `Fault` is a bug that a real connector has had.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    group_kernel_blocks,
)

from hybridkv.connectors.vllm.common.compat import hash_block_tokens
from oracle.settings import Connector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from oracle.mixes import Mix

Key = tuple[int, bytes]


class Fault(enum.Enum):
    NONE = "none"
    SHORT_WINDOW = "the window is loaded one block short"
    PREVIOUS_STATE = "the state of the boundary before is loaded"
    STALE_PAGE = "one page of one block is not written"
    ZERO_PAGE = "one page of one block is zeroed"
    SWAPPED_LAYERS = "two layers of a group are swapped"
    SHIFTED_BLOCK = "each FULL block is loaded from its neighbour"
    WHOLE_PROMPT = "a hit reaches the last token"
    EARLY_REPORT = "a load is reported before its bytes are written"
    LATE_STORE = "a source block is read one step late, without a fence"
    EARLY_STATE = "a state is read before the step that makes it"
    LEAKED_BLOCKS = "a request's blocks are kept for ever"
    LOST_LOAD = "a load is never reported"
    SYNC_STATE = "a recurrent state is loaded synchronously"


@dataclass(slots=True)
class PageLoad:
    request_id: str
    copies: list[tuple[Key, int]]
    left_steps: int = 0


@dataclass(slots=True)
class Metadata(KVConnectorMetadata):
    loads: list[PageLoad] = field(default_factory=list)
    stores: list[tuple[Key, int]] = field(default_factory=list)


class BlockStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Extra config: `store` (the shared dict), `fault`, `load` ("async" or "sync"), `delay_steps`, `fail_every`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        self._store: dict[Key, dict[str, torch.Tensor]] = extra["store"]
        self._fault = Fault(extra.get("fault", Fault.NONE))
        self._asynchronous = extra.get("load", "async") == "async"
        self._delay_steps: int = extra.get("delay_steps", 0)
        self._fail_every: int = extra.get("fail_every", 0)
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._block_tokens = [spec.block_size for spec in self._specs]
        self._unit = math.lcm(*self._block_tokens)
        self._hash_tokens = hash_block_tokens(vllm_config, kv_cache_config)
        # Scheduler role.
        self._requests: dict[str, Request] = {}
        self._planned: list[PageLoad] = []
        self._load_keys: dict[str, list[Key]] = {}
        self._local_tokens: dict[str, int] = {}
        self._failed: set[str] = set()
        self._holding: set[str] = set()
        # Worker role.
        self._in_flight: list[PageLoad] = []
        self._late_stores: list[tuple[Key, int]] = []
        self._num_loads = 0
        self._results = KVConnectorTransferResults(set(), set())

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler role

    def _key(self, request: Request, group: int, end_tokens: int) -> Key:
        return group, bytes(request.block_hashes[end_tokens // self._hash_tokens - 1])

    def _first_block(self, spec: KVCacheSpec, num_tokens: int) -> int:
        """The first block of a group that must be correct to resume at `num_tokens`."""
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, num_tokens - spec.sliding_window + 1) // spec.block_size
            return first + (self._fault is Fault.SHORT_WINDOW)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return num_tokens // spec.attention_chunk_size * spec.attention_chunk_size // spec.block_size
        if isinstance(spec, MambaSpec):
            return num_tokens // spec.block_size - 1
        return 0

    def _needed(self, request: Request, group: int, start: int, end: int) -> list[tuple[int, Key]]:
        """(index in the table, key) of the blocks to load for a request that holds `start` tokens and resumes at
        `end`."""
        spec = self._specs[group]
        size = spec.block_size
        first = max(self._first_block(spec, end), start // size)
        return [(index, self._key(request, group, (index + 1) * size)) for index in range(first, end // size)]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._local_tokens[request.request_id] = num_computed_tokens
        if self._holding - {request.request_id}:
            # One load at a time, or vLLM 0.32 hangs, in two ways. It reserves too few blocks for two loads where groups
            # have windows, and they wait for each other. And a request with a failed load keeps its place before those
            # that hold loaded blocks: if it does not fit, the scan stops there and no request ever runs. Returning None
            # lets the scan continue.
            return None, False
        if request.request_id in self._failed:
            # A second load would have to fit beside the blocks still reserved for the first.
            return 0, False
        last = request.num_tokens - (0 if self._fault is Fault.WHOLE_PROMPT else 1)
        for end in range(last // self._unit * self._unit, num_computed_tokens, -self._unit):
            if all(
                key in self._store
                for group in range(len(self._specs))
                for _, key in self._needed(request, group, num_computed_tokens, end)
            ):
                return end - num_computed_tokens, self._asynchronous
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        if num_external_tokens == 0:
            return
        # The hashes of blocks do not tell which ones to load: those of a sync load are hashed already.
        copies: list[tuple[Key, int]] = []
        start = self._local_tokens[request.request_id]
        for group in range(len(self._specs)):
            table = blocks.blocks[group]
            for index, key in self._needed(request, group, start, start + num_external_tokens):
                if not table[index].is_null:
                    copies.append((self._faulty_key(request, group, index, key), table[index].block_id))
        self._planned.append(PageLoad(request.request_id, copies))
        if self._asynchronous:
            self._holding.add(request.request_id)
        self._load_keys[request.request_id] = [key for key, _ in copies]

    def _faulty_key(self, request: Request, group: int, index: int, key: Key) -> Key:
        size = self._block_tokens[group]
        recurrent = isinstance(self._specs[group], MambaSpec)
        wanted = Fault.PREVIOUS_STATE if recurrent else Fault.SHIFTED_BLOCK
        if self._fault is wanted and index > 0:
            before = self._key(request, group, index * size)
            return before if before in self._store else key
        return key

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Metadata:
        loads, self._planned = self._planned, []
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        stores: dict[Key, int] = {}
        self._holding.difference_update(scheduler_output.num_scheduled_tokens)
        self._failed.difference_update(scheduler_output.num_scheduled_tokens)
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            start, tables = request.num_computed_tokens, state.resolve_block_ids(request_id)
            for group, (table, size) in enumerate(zip(tables, self._block_tokens, strict=True)):
                if isinstance(self._specs[group], MambaSpec):
                    continue
                for index in range(start // size, (start + num_tokens) // size):
                    if table[index] != 0 and (index + 1) * size <= request.num_tokens:
                        stores[self._key(request, group, (index + 1) * size)] = table[index]
        for request_id, offers in state.boundary_state_offloads.items():
            for group, block_id, boundary in offers:
                if boundary % self._block_tokens[group] == 0:
                    stores[self._key(self._requests[request_id], group, boundary)] = block_id
        return Metadata(loads, [(key, block) for key, block in stores.items() if key not in self._store])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.failed_recving or ():
            if request_id in self._requests:
                self._failed.add(request_id)
            self._holding.discard(request_id)
            for key in self._load_keys.pop(request_id, []):
                self._store.pop(key, None)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        self._local_tokens.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        self._holding.discard(request.request_id)
        self._load_keys.pop(request.request_id, None)
        return self._fault is Fault.LEAKED_BLOCKS, None

    def reset_cache(self) -> bool:
        self._store.clear()
        return True

    # Worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = self._kv_cache_config.num_blocks
        grouped = {name: group_kernel_blocks(tensor, blocks) for name, tensor in kv_caches.items()}
        self._layers = [
            {name: grouped[name] for name in group.layer_names} for group in self._kv_cache_config.kv_cache_groups
        ]

    def _write(self, load: PageLoad) -> None:
        for position, (key, block_id) in enumerate(load.copies):
            pages = self._store.get(key)
            assert pages is not None, "loaded keys are kept until the load is over"
            names = list(pages)
            for number, name in enumerate(names):
                source = pages[name]
                if self._fault is Fault.SWAPPED_LAYERS and len(names) > 1:
                    other = pages[names[(number + 1) % len(names)]]
                    source = other if other.shape == source.shape else source
                if position == len(load.copies) - 1 and number == len(names) - 1:
                    if self._fault is Fault.STALE_PAGE:
                        continue
                    if self._fault is Fault.ZERO_PAGE:
                        source = torch.zeros_like(source)
                self._layers[key[0]][name][block_id] = source

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        if not self._asynchronous:
            for load in metadata.loads:
                self._write(load)
            return
        for load in metadata.loads:
            load.left_steps = self._delay_steps
            self._in_flight.append(load)
            if self._fault is Fault.EARLY_REPORT:
                self._results.finished_recving.add(load.request_id)
                load.left_steps += 2
        for load in self._in_flight:
            load.left_steps -= 1
        done = [load for load in self._in_flight if load.left_steps < 0]
        self._in_flight = [load for load in self._in_flight if load.left_steps >= 0]
        for load in done:
            self._finish(load)

    def _finish(self, load: PageLoad) -> None:
        self._num_loads += 1
        if self._fault is Fault.LOST_LOAD:
            return
        if self._fail_every and self._num_loads % self._fail_every == 0:
            self._results.failed_recving.add(load.request_id)
        elif all(key in self._store for key, _ in load.copies):
            self._write(load)
        else:  # The store was reset while the load was in flight.
            self._results.failed_recving.add(load.request_id)
        if self._fault is not Fault.EARLY_REPORT:
            self._results.finished_recving.add(load.request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Metadata)
        if self._fault is Fault.EARLY_STATE:
            stores = kv_connector_metadata.stores
            self._copy_out([store for store in stores if isinstance(self._specs[store[0][0]], MambaSpec)])

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        stores = metadata.stores
        if self._fault is Fault.LATE_STORE:
            stores, self._late_stores = self._late_stores, stores
        self._copy_out(stores)

    def _copy_out(self, stores: list[tuple[Key, int]]) -> None:
        for key, block_id in stores:
            if key not in self._store:
                pages = self._layers[key[0]]
                self._store[key] = {name: tensor[block_id].clone() for name, tensor in pages.items()}

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self._results = self._results, KVConnectorTransferResults(set(), set())
        return results


def block_store(
    mix: Mix, load: str = "async", delay_steps: int = 0, fail_every: int = 0, fault: Fault = Fault.NONE
) -> Connector:
    """A connector with an empty store. A mix with states loads asynchronously, whatever `load` is."""
    only_async = mix.has_recurrent and fault is not Fault.SYNC_STATE
    extra = {
        "store": {},
        "load": "async" if only_async else load,
        "delay_steps": delay_steps,
        "fail_every": fail_every,
        "fault": fault.value,
    }
    return Connector("BlockStoreConnector", extra, "oracle.block_store")
