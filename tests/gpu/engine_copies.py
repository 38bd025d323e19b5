"""The batched copies of `copies: "engine"`: vLLM's own where vLLM for CUDA is installed, else a named stand-in.

A stand-in enqueues the same copies in the current stream. It shows that streams, events and fences around the copies
are right; it says nothing about vLLM's code.
"""

from __future__ import annotations

import ctypes

import torch

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.copies.devices import EngineCopies
from hybridkv.transfer.cuda import MemoryKind
from hybridkv.transfer.cuda.driver import memory_kind

_PORTABLE = 1
"""cudaHostRegisterPortable."""


def vllm_copies() -> tuple[str, EngineCopies | None]:
    """vLLM's copies and its name, or None and the reason."""
    try:
        import vllm

        return f"vLLM {vllm.__version__}", compat.engine_copies()
    except (ImportError, OSError, RuntimeError, ConfigurationError) as error:
        return f"vLLM for CUDA cannot be imported: {type(error).__name__}: {error}", None


def find_engine_copies() -> tuple[str, EngineCopies]:
    """The copies and their name: the first that this machine has."""
    name, copies = vllm_copies()
    if copies is not None:
        return f"swap_blocks_batch of {name}", copies
    name = "STAND-IN for swap_blocks_batch: a torch copy for each page"
    return name, EngineCopies(_by_torch, _host_register, _host_unregister, _no_error)


def _by_torch(
    sources: torch.Tensor, destinations: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
) -> None:
    for source, destination, size in zip(sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True):
        _bytes_at(destination, size).copy_(_bytes_at(source, size), non_blocking=True)


def _bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    if memory_kind(address, torch.cuda.current_device()) is MemoryKind.DEVICE:
        return torch.as_tensor(_DeviceBytes(address, num_bytes), device="cuda")
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


class _DeviceBytes:
    """Memory of the GPU in the form that torch takes without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        pointer = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = pointer


def _host_register(address: int, num_bytes: int) -> bool:
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE)) == 0


def _host_unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _no_error() -> int:
    """Stand-ins raise."""
    return 0


__all__ = ["find_engine_copies", "vllm_copies"]
