"""The compiled library that `hybridkv.transfer.cuda` loads. Says where they are, and imports nothing."""

from __future__ import annotations

from pathlib import Path

__all__ = ["library_path"]


def library_path() -> Path:
    """Of the library with the functions of csrc/cuda/copier.cc, for ctypes.

    Raises:
        FileNotFoundError: this is the source tree, or a wheel that was built without the library.
    """
    path = Path(__file__).with_name("libhybridkv_cuda.so")
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; hint: tools/bazel build //csrc/cuda:wheel, and install that")
    return path
