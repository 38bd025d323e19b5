"""Host memory that a device reads and writes directly: mapped here or by the caller, registered by whoever can."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridkv.transfer.errors import TransferError


def map_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Page-aligned memory, uint8, zeroed; huge pages where there are any. Given back when all views are gone.

    A forked child does not get it. Otherwise the first write of the parent would move the page to other memory, and the
    device would go on with the old.

    Raises:
        TransferError: there is not so much.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes: expected a number >= 1, got {num_bytes}")
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise TransferError(f"mmap of {num_bytes} bytes: {error}") from error
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin, and for the GPU to look up
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(mapping, dtype=np.uint8)


def pin(
    memory: npt.NDArray[np.uint8], register: Callable[[int, int], None], unregister: Callable[[int], object]
) -> None:
    """Pin memory until the array and all its views are gone. The operating system commits all of it now.

    Args:
        memory: contiguous.
        register: pins (address, num_bytes); what it raises is raised.
        unregister: ends that, by the address.
    """
    address = int(memory.ctypes.data)
    register(address, memory.nbytes)
    # The owner is an argument so that it outlives the registration.
    weakref.finalize(memory, _unregister, unregister, address, memory.base)


def _unregister(unregister: Callable[[int], object], address: int, owner: Any) -> None:
    # At the end of a process the device may be gone already, and the memory goes with it.
    unregister(address)
