"""Pointer attributes from the CUDA driver, through ctypes, because torch has no call for them."""

from __future__ import annotations

import ctypes
import functools

from hybridkv.transfer.cuda.device import CudaError, MemoryKind

_SUCCESS = 0
_INVALID_VALUE = 1
_MEMORY_TYPE, _DEVICE_POINTER, _DEVICE_ORDINAL = 2, 3, 9
"""Values of CUpointer_attribute, in cuda.h."""
_HOST, _DEVICE = 1, 2
"""Values of CUmemorytype."""


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"libcuda.so.1: {error}") from error


def _attribute(attribute: int, address: int, value: ctypes._SimpleCData[int]) -> bool:
    """Read an attribute into `value`. False if the address is unknown to the driver."""
    code = _driver().cuPointerGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_uint64(address))
    if code not in (_SUCCESS, _INVALID_VALUE):
        raise CudaError(f"cuPointerGetAttribute({attribute}): CUresult {code}")
    return bool(code == _SUCCESS)


def memory_kind(address: int, device_index: int) -> MemoryKind:
    """Kind of the memory at an address. The calling thread needs a current CUDA context.

    Host memory is `PINNED` only if its address is the same on the GPU. The kernel requires this.
    """
    kind = ctypes.c_uint(0)
    if not _attribute(_MEMORY_TYPE, address, kind):
        return MemoryKind.OTHER
    if kind.value == _DEVICE:
        ordinal = ctypes.c_int(-1)
        is_ours = _attribute(_DEVICE_ORDINAL, address, ordinal) and ordinal.value == device_index
        return MemoryKind.DEVICE if is_ours else MemoryKind.OTHER
    pointer = ctypes.c_uint64(0)
    is_shared = kind.value == _HOST and _attribute(_DEVICE_POINTER, address, pointer) and pointer.value == address
    return MemoryKind.PINNED if is_shared else MemoryKind.OTHER
