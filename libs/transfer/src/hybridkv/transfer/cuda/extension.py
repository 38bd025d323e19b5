"""Finds the compiled kernels of the distribution hybridkv-cuda, and says once when they cannot be used."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

INTERFACE_VERSION = 1
"""Of the operators in csrc/cuda/torch_ops.cc, and of the rows of the table."""

_WITHOUT = "each run is copied by a call of its own, which is slow for small pages"


@functools.cache
def cuda_kernels() -> Any:
    """`torch.ops.hybridkv_cuda`, None when it cannot be used. Looks once in a process."""
    try:
        module = importlib.import_module("hybridkv.cuda_kernels")
    except ImportError as error:
        logger.warning("hybridkv-cuda is not installed (%s); %s", error, _WITHOUT)
        return None
    try:
        torch.ops.load_library(str(module.library_path()))
        version = torch.ops.hybridkv_cuda.interface_version()
    except (OSError, RuntimeError, AttributeError) as error:
        logger.warning("hybridkv-cuda cannot be loaded into torch %s (%s); %s", torch.__version__, error, _WITHOUT)
        return None
    if version != INTERFACE_VERSION:
        logger.warning(
            "hybridkv-cuda has interface version %d and hybridkv-transfer needs %d: install matching versions; %s",
            version,
            INTERFACE_VERSION,
            _WITHOUT,
        )
        return None
    return torch.ops.hybridkv_cuda
