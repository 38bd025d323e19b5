"""The compiled library that `hybridkv.transfer.cuda` loads. This package gives its path, and imports nothing else."""

from __future__ import annotations

from pathlib import Path

__all__ = ["library_path"]


def library_path() -> Path:
    """Path of the library with the functions of csrc/cuda/copier.cc, for ctypes.

    Raises:
        FileNotFoundError: the package is in the source tree, or in a wheel without the library.
    """
    path = Path(__file__).with_name("libhybridkv_cuda.so")
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; hint: tools/bazel build //csrc/cuda:wheel, and install the wheel")
    return path
