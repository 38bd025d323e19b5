"""Finds NIXL, sets what UCX must know before it is loaded, and gives its exceptions words. Imports it when asked."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport.contract import FailureReason

# The first two do not import torch to find out which of them it is.
MODULES = ("nixl_cu12", "nixl_cu13", "nixl")

_REASONS = {
    "nixlRemoteDisconnectError": FailureReason.GONE,
    "nixlCancelledError": FailureReason.CANCELLED,
    "nixlNotFoundError": FailureReason.REFUSED,
    "nixlMismatchError": FailureReason.REFUSED,
    "nixlNotAllowedError": FailureReason.REFUSED,
}


def require_nixl() -> None:
    """`PeersConfigurationError` where NIXL is not installed. Looks without importing it."""
    if not any(importlib.util.find_spec(name) for name in MODULES):
        raise _missing(f"none of {', '.join(MODULES)}")


def _missing(got: str) -> PeersConfigurationError:
    return PeersConfigurationError("nixl", "NIXL, installed", got, "pip install 'hybridkv-peers[nixl]'")


def load_nixl() -> Any:
    """The module with `nixl_agent`. `PeersConfigurationError` where none is installed or none can be loaded."""
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
    """Settings that are read once. What the operator has set stays."""
    if any(f"{name}._bindings" in sys.modules for name in MODULES):
        return
    if not _has_infiniband():
        # Its module brings a libnl that crashes the process at exit. Without such a device nothing is lost.
        os.environ.setdefault("UCX_MODULES", "^ib")
    # Else registrations that were given back pile up.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")


def _has_infiniband() -> bool:
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def reason_of(error: BaseException) -> FailureReason:
    """What NIXL's exceptions mean here; BROKEN for what is not known."""
    return _REASONS.get(type(error).__name__, FailureReason.BROKEN)
