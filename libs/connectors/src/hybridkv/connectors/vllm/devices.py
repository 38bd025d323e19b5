"""What differs between the devices that an engine runs on: who copies, and what memory the arena is made of.

`cpu` copies with memmove. `cuda` copies with `hybridkv.transfer.cuda`, on the GPU that is current in this worker, from
and to pinned memory. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import compat
from hybridkv.transfer import CopyEngine, CpuCopyEngine, InlineCopyEngine

DEVICE_TYPES = ("cpu", "cuda")
ZERO_BYTES = 64 * 1024
"""Of memory that is zero, on each worker's device."""
_HINT = "run vLLM on a CPU or on NVIDIA GPUs"


def require_allowed(device_type: str, experimental_cuda: bool) -> str:
    """The device type, if it may be used.

    Raises:
        ConfigurationError: it is not known; or it is `cuda`, whose copies no GPU has carried out yet, and nobody asked.
    """
    _require_known(device_type)
    if device_type == "cuda" and not experimental_cuda:
        hint = 'say "experimental_cuda": true to try copies that were compiled and simulated, and never run on a GPU'
        raise ConfigurationError("device", "KV caches in host memory", device_type, hint)
    return device_type


def permit_instructions(device_type: str) -> None:
    """What the engine's kernels take for granted on this device, whatever it runs first."""
    if device_type == "cpu":
        compat.permit_amx()


def copy_engines(device_type: str, load: str) -> tuple[CopyEngine, CopyEngine]:
    """Who stores and who loads, for this worker.

    Args:
        device_type: vLLM's name of its device.
        load: "async", or "sync" for loads that have ended when they were submitted.

    Raises:
        ConfigurationError: there is no copy engine for this device, or the device cannot be used.
    """
    _require_known(device_type)
    if device_type == "cpu":
        stores = CpuCopyEngine()
        return stores, stores if load == "async" else InlineCopyEngine()
    from hybridkv.transfer.cuda import CudaCopyEngine, CudaError, InlineCudaCopyEngine, open_device

    try:
        index = _current_gpu()
        load_engine = CudaCopyEngine if load == "async" else InlineCudaCopyEngine
        # An engine each, so that loads and stores share neither a queue nor a direction of the link.
        return CudaCopyEngine(open_device(index)), load_engine(open_device(index))
    except CudaError as error:
        raise ConfigurationError("device", "a GPU that torch can use", str(error), _HINT) from error


def arena_memory(device_type: str, num_bytes: int) -> npt.NDArray[np.uint8] | None:
    """Memory for this worker's arena, None where the arena may take ordinary memory.

    Raises:
        ConfigurationError: the memory cannot be pinned.
    """
    _require_known(device_type)
    if device_type == "cpu":
        return None
    from hybridkv.transfer.cuda import CudaError, pin_memory

    try:
        return pin_memory(num_bytes)
    except CudaError as error:
        hint = "lower the capacity of the ram tier, or raise the limit on locked memory"
        raise ConfigurationError("capacity", "memory that can be pinned", str(error), hint) from error


def reach_memory(device_type: str, memory: npt.NDArray[np.uint8]) -> None:
    """Let this worker's device copy to and from memory that is there already, until all views of it are gone.

    Raises:
        ConfigurationError: the memory cannot be pinned.
    """
    _require_known(device_type)
    if device_type == "cpu":
        return
    from hybridkv.transfer.cuda import CudaError, pin_existing

    try:
        pin_existing(memory)
    except CudaError as error:
        hint = "lower the pool, or raise the limit on locked memory"
        raise ConfigurationError("pool", "memory that can be pinned", str(error), hint) from error


def zero_memory(device: Any) -> Any:
    """A tensor of `ZERO_BYTES` bytes that are zero by now, beside the KV caches on their device."""
    import torch

    memory = torch.zeros(ZERO_BYTES, dtype=torch.uint8, device=device)
    if memory.is_cuda:
        torch.cuda.synchronize(device)
    return memory


def require_same_device(kv_caches: Mapping[str, Any], device_type: str) -> None:
    """Refuse KV caches that lie on another device than the one that the copy engines were made for.

    Raises:
        ConfigurationError: naming the first such layer.
    """
    for name, cache in kv_caches.items():
        tensors: Iterable[Any] = [cache] if hasattr(cache, "device") else cache
        for tensor in tensors:
            if tensor.device.type != device_type:
                expected = f"KV caches on {device_type}"
                raise ConfigurationError("device", expected, f"{tensor.device} ({name})", _HINT)


def _require_known(device_type: str) -> None:
    if device_type not in DEVICE_TYPES:
        raise ConfigurationError("device", " or ".join(DEVICE_TYPES), device_type, _HINT)


def _current_gpu() -> int:
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_available() else 0
