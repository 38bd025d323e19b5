"""libhybridkv_cuda.so on a machine without a GPU: it can be loaded, and its errors name the failed call."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from hybridkv.cuda_kernels import library_path

needs_no_gpu = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="tests the behaviour without a GPU")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(library_path()))


def test_the_library_reports_its_interface_version(library: ctypes.CDLL) -> None:
    assert library.hybridkv_cuda_interface_version() == 4


@needs_no_gpu
def test_batched_copies_are_unavailable_without_a_driver(library: ctypes.CDLL) -> None:
    assert library.hybridkv_cuda_has_batch_copy() == 0


@needs_no_gpu
def test_a_failed_cuda_call_is_an_error_with_its_name(library: ctypes.CDLL) -> None:
    error = ctypes.create_string_buffer(200)
    copier = ctypes.c_void_p()
    limits = (ctypes.c_uint64 * 6)(4096, 4096, 4096, 4096, 1 << 36, 1)
    failed = library.hybridkv_cuda_open(0, limits, ctypes.byref(copier), error, ctypes.c_uint64(len(error)))
    assert failed == 1
    assert copier.value is None
    assert error.value.startswith(b"cudaSetDevice: cudaError")
