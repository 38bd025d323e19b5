"""Host memory for vLLM's own OffloadingConnector on the CPU build, where its own worker does not run.

All decisions are vLLM's: the connector with its scheduler and worker halves, and the manager of stored blocks. Only the
copy, a CUDA kernel in vLLM, is an assignment here. vLLM loads it as an external spec (`spec_name`, `spec_module_path`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

KV_TRANSFER_CONFIG: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "spec_name": "HostMemorySpec",
        "spec_module_path": "cpu_offloading_spec",
        "cpu_bytes_to_use": 512 << 20,
    },
}
"""Chunks of one block, the default, and 512 MiB."""


class HostMemorySpec(CPUOffloadingSpec):
    """vLLM's spec with a worker that copies within host memory."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError(f"blocks_per_chunk {self.blocks_per_chunk}: this worker knows chunks of one block")
        return _Copies(kv_caches, self.num_chunks)


class _Copies(OffloadingWorker):
    """Copies immediately, in the order of the calls."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._caches = kv_caches
        self._memory = [torch.empty((num_chunks, each.page_size_bytes), dtype=torch.int8) for each in kv_caches.tensors]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for tensor, block, chunk, num_bytes in self._pages(src_spec, dst_spec):
            self._memory[tensor][chunk, :num_bytes] = self._caches.tensors[tensor].tensor[block, :num_bytes]
        self._ended.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for tensor, block, chunk, num_bytes in self._pages(dst_spec, src_spec):
            self._caches.tensors[tensor].tensor[block, :num_bytes] = self._memory[tensor][chunk, :num_bytes]
        self._ended.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """No copy is pending."""

    def _pages(self, engine: GPULoadStoreSpec, stored: LoadStoreSpec) -> Iterator[tuple[int, int, int, int]]:
        """Tensor, block, chunk and bytes of every page."""
        assert isinstance(stored, CPULoadStoreSpec)
        blocks, chunks = iter(engine.block_ids.tolist()), iter(stored.chunk_ids.tolist())
        for group, size in enumerate(engine.group_sizes):
            for _ in range(size):
                block, chunk = next(blocks), next(chunks)
                for ref in self._caches.group_data_refs[group]:
                    yield ref.tensor_idx, block, chunk, ref.page_size_bytes
