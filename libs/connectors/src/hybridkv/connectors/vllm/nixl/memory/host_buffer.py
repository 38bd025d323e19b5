"""Host buffer: a copy of the engine's KV cache in host memory, for a device with memory that peers cannot read.

The buffer has the same layout as the engine's KV cache, block for block, so transfers use both in the same way. A
producer copies blocks from the device after the prompt is computed and before the request is offered. A consumer copies
blocks to the device after the read is checked and before the load is reported. The engine's thread waits for both
copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hybridkv.canonical import LayerLayout
from hybridkv.canonical.torch_view import CanonicalKVCaches, KVCache, LayoutError, canonical_kv_caches
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.nixl.messages import HostCopy, PromptLoad
from hybridkv.peers.cells import moved_span
from hybridkv.peers.tables import offered
from hybridkv.planner import GroupKind, GroupSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from hybridkv.connectors.vllm.common.compat import BlockTables

COPY_BYTES = 64 << 20
"""Maximum device memory for one copy, in bytes; at least one block is copied."""
NULL_BLOCK = 0

BlockIds = Sequence[Sequence[int]]
"""Blocks of each group; 0 for no block."""


def needs_host_buffer(vllm_config: VllmConfig) -> bool:
    """True if transfers must use a copy in host memory: always, unless the engine runs on a CPU.

    Raises:
        ConfigurationError: the engine runs on a device, and `kv_buffer_device` is not "cpu".
    """
    device = vllm_config.device_config.device_type
    if device == "cpu":
        return False
    asked = str(vllm_config.kv_transfer_config.kv_buffer_device)
    if asked != "cpu":
        hint = "this takes as much host memory as the KV cache; this version cannot transfer device memory"
        raise ConfigurationError("kv_transfer_config.kv_buffer_device", f'"cpu" on {device}', asked, hint)
    return True


class HostBuffer:
    """Host memory of the size of the engine's KV cache, with copies in both directions.

    Args:
        kv_caches: tensors that the engine registers.
        layers: for each group, the layers that peers read.
        num_blocks: blocks in the engine's pool.

    Raises:
        ConfigurationError: the tensors differ from the engine's description.
    """

    def __init__(
        self, kv_caches: Mapping[str, KVCache], layers: Sequence[Sequence[LayerLayout]], num_blocks: int
    ) -> None:
        storages: dict[int, torch.Tensor] = {}
        self.kv_caches = {name: _mirrored(cache, storages) for name, cache in kv_caches.items()}
        self.num_bytes = sum(storage.nbytes for storage in storages.values())
        try:
            self._device = canonical_kv_caches(kv_caches, layers, num_blocks)
            self._host = canonical_kv_caches(self.kv_caches, layers, num_blocks)
        except LayoutError as error:
            raise ConfigurationError(
                "kv_caches", "tensors as the engine describes them", str(error), "report the model and vLLM's version"
            ) from error

    def save(self, block_ids: BlockIds) -> None:
        """Copies blocks from the device and waits for the copy."""
        with compat.allow_device_waits():
            _copy(self._device, self._host, block_ids)

    def load(self, block_ids: BlockIds) -> None:
        """Copies blocks to the device and waits for the copy."""
        with compat.allow_device_waits():
            _copy(self._host, self._device, block_ids)

    def clear(self, block_ids: BlockIds) -> None:
        """Sets blocks to zero before a read, so that `load` copies no old bytes."""
        for index, ids in _by_tensor(self._host, block_ids):
            self._host.tensors[index].tensor[ids] = 0


def _copy(source: CanonicalKVCaches, target: CanonicalKVCaches, block_ids: BlockIds) -> None:
    for index, ids in _by_tensor(source, block_ids):
        origin, place = source.tensors[index].tensor, target.tensors[index].tensor
        for some in ids.split(max(1, COPY_BYTES // origin.shape[1])):
            pages = origin.index_select(0, some.to(origin.device)).to(place.device)
            place.index_copy_(0, some.to(place.device), pages)


def _by_tensor(caches: CanonicalKVCaches, block_ids: BlockIds) -> Iterator[tuple[int, torch.Tensor]]:
    """Blocks by tensor. A block belongs to one group at a time."""
    wanted: dict[int, set[int]] = {}
    for refs, ids in zip(caches.group_data_refs, block_ids, strict=True):
        for ref in refs:
            wanted.setdefault(ref.tensor_idx, set()).update(block for block in ids if block != NULL_BLOCK)
    for index, blocks in wanted.items():
        if blocks:
            yield index, torch.tensor(sorted(blocks), dtype=torch.int64)


def _mirrored(cache: KVCache, storages: dict[int, torch.Tensor]) -> KVCache:
    if not isinstance(cache, torch.Tensor):
        return [_mirrored_tensor(each, storages) for each in cache]
    return _mirrored_tensor(cache, storages)


def _mirrored_tensor(tensor: torch.Tensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    """Same view of a host copy of the storage. Layers that share a storage on the device share its copy."""
    storage = tensor.untyped_storage()
    mirror = storages.get(storage.data_ptr())
    if mirror is None:
        is_pinned = tensor.device.type == "cuda"
        mirror = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        storages[storage.data_ptr()] = mirror
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return view.set_(mirror.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class HostCopyTracker:
    """Number of tokens in the host buffer for each request that may be handed over.

    Args:
        groups: groups of the model.
    """

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._groups = tuple(groups)
        self._requests: dict[str, Request] = {}
        self._saved_tokens: dict[str, int] = {}

    def begin(self, request: Request) -> None:
        """Tracks a request that may be handed over."""
        self._requests[request.request_id] = request

    def end(self, request: Request) -> int:
        """Stops tracking an ended request. Returns the number of its tokens in the host buffer."""
        if self._requests.pop(request.request_id, None) is None:
            return 0
        return self._saved_tokens.pop(request.request_id, 0)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Resets the saved tokens of preempted requests, which have lost their blocks. A request may later get another
        request's blocks with the same tokens, and the host buffer does not have these blocks."""
        for request_id in request_ids:
            self._saved_tokens.pop(request_id, None)

    def of_step(self, scheduled_tokens: Mapping[str, int], tables: BlockTables) -> list[HostCopy]:
        """Copies to make after this step, for requests with a complete prompt after it. Counts their tokens as saved.

        Args:
            scheduled_tokens: number of tokens by request of this step.
            tables: block tables by request.
        """
        plans = []
        for name, request in self._requests.items():
            count = scheduled_tokens.get(name)
            before = request.num_computed_tokens
            if count is None or before + count < request.num_prompt_tokens:
                continue
            saved = self._saved_tokens.get(name, 0)
            # If fewer tokens are computed than saved, the request has started again, with other blocks.
            kept = saved if saved <= before else 0
            plans.append(HostCopy(self._blocks(tables(name), kept, before + count)))
            self._saved_tokens[name] = before + count
        return plans

    def _blocks(self, table: Sequence[Sequence[int]], kept: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Blocks of each group to hand over that changed after the first `kept` tokens."""
        found = offered(self._groups, table, num_tokens)
        blocks = []
        for group, first, ids in zip(self._groups, found.first_blocks, found.block_ids, strict=True):
            skipped = 0 if group.kind is GroupKind.RECURRENT else max(0, kept // group.block_tokens - first)
            blocks.append(tuple(ids[skipped:]))
        return tuple(blocks)


def loaded_blocks(groups: Sequence[GroupSpec], load: PromptLoad) -> tuple[tuple[int, ...], ...]:
    """Blocks of each group that a load writes.

    Args:
        groups: groups of this engine.
        load: load of a request.
    """
    blocks = []
    for group, table in zip(groups, load.block_ids, strict=True):
        span = moved_span(group, load.num_tokens, load.computed_tokens)
        first, last = span.start // group.block_tokens, -(-span.end // group.block_tokens)
        blocks.append(tuple(table[first:last]) if span.num_tokens else ())
    return tuple(blocks)
