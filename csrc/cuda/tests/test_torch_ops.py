"""torch.ops.hybridkv_cuda in a torch without a GPU: it loads, checks what it is given, and its errors name the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridkv.cuda_kernels import library_path

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this is what happens without a GPU")


@pytest.fixture(scope="module")
def ops() -> Any:
    torch.ops.load_library(str(library_path()))
    return torch.ops.hybridkv_cuda


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_the_operators_say_which_interface_they_have(ops: Any) -> None:
    assert ops.interface_version() == 1


@needs_no_gpu
def test_no_driver_has_no_batched_copies(ops: Any) -> None:
    assert ops.has_batch_copy() is False


@needs_no_gpu
def test_a_cuda_call_that_fails_is_an_exception_with_its_name(ops: Any) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"cudaMemcpyAsync: cudaError\w+ \("):
        ops.copy_batch(column(memory.data_ptr()), column(memory.data_ptr() + 32), column(8), 0)


@needs_no_gpu
def test_kernels_that_no_device_can_take_are_an_exception_with_the_calls_name(ops: Any) -> None:
    with pytest.raises(RuntimeError, match=r"cudaFuncGetAttributes\(copy_kernel\): cudaError\w+ \("):
        ops.load_kernels()


def test_an_empty_batch_calls_nothing(ops: Any) -> None:
    ops.copy_batch(column(), column(), column(), 0)


@pytest.mark.parametrize(
    "columns",
    [
        (column(1, 2), column(1), column(1, 2)),
        (column(1, 2), column(1, 2), column(1)),
        (column(1).to(torch.int32), column(1), column(1)),
        (column(1, 2, 3, 4)[::2], column(1, 2), column(1, 2)),
        (column(1).reshape(1, 1), column(1), column(1)),
    ],
)
def test_columns_that_are_no_batch_are_refused(ops: Any, columns: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(RuntimeError, match="expected a contiguous int64 tensor"):
        ops.copy_batch(*columns, 0)


def test_tables_in_host_memory_are_refused(ops: Any) -> None:
    with pytest.raises(NotImplementedError, match="CPU"):
        ops.copy_fragments(torch.zeros(1, 8, dtype=torch.int64), 1, 4096, 1, 0)
