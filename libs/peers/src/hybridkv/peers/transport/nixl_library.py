"""Loads NIXL on demand, sets environment variables that UCX reads on load, and maps NIXL's exceptions."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport.contract import TransferFailureReason

# The first two do not import torch to select the variant.
MODULES = ("nixl_cu12", "nixl_cu13", "nixl")

_REASONS = {
    "nixlRemoteDisconnectError": TransferFailureReason.GONE,
    "nixlCancelledError": TransferFailureReason.CANCELLED,
    "nixlNotFoundError": TransferFailureReason.REFUSED,
    "nixlMismatchError": TransferFailureReason.REFUSED,
    "nixlNotAllowedError": TransferFailureReason.REFUSED,
}


def require_nixl() -> None:
    """Raises `PeersConfigurationError` if NIXL is not installed. Does not import it."""
    if not any(importlib.util.find_spec(name) for name in MODULES):
        raise _missing(f"none of {', '.join(MODULES)}")


def _missing(got: str) -> PeersConfigurationError:
    return PeersConfigurationError("nixl", "NIXL, installed", got, "pip install nixl")


def load_nixl() -> Any:
    """Sets environment variables of UCX and NIXL that are not set, and imports the module with `nixl_agent`.

    Raises `PeersConfigurationError` if NIXL is not installed or cannot be loaded.
    """
    require_nixl()
    _prepare()
    failures = []
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as error:
            failures.append(f"{name}: {error}")
    raise _missing("; ".join(failures))


def _prepare() -> None:
    """Sets environment variables that UCX and NIXL read once, on load. Keeps values that are already set."""
    if any(f"{name}._bindings" in sys.modules for name in MODULES):
        return
    if not _has_infiniband():
        # The ib module loads a libnl that crashes the process at exit. Without InfiniBand the module is not needed.
        os.environ.setdefault("UCX_MODULES", "^ib")
    # UCX keeps registrations that the caller has released. This variable limits them; otherwise they grow without
    # bound.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")


def _has_infiniband() -> bool:
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def reason_of(error: BaseException) -> TransferFailureReason:
    """Failure reason of a NIXL exception; BROKEN for an unknown one."""
    return _REASONS.get(type(error).__name__, TransferFailureReason.BROKEN)
