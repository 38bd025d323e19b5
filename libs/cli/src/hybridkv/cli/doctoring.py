"""Checks of a machine for an operator: installed parts, limits of the system, and the tiers of a configuration.

Imports neither torch nor vLLM. Writes one temporary file to each disk and one temporary object to each object store.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from hybridkv.connectors.config import format_size

SLOW_FSYNC_S = 0.05
_GIB = 1 << 30


class CheckResult(msgspec.Struct, frozen=True):
    """One check.

    Args:
        status: "fail" if an engine would not start; "warn" if it would start with less function or speed.
        name: name of the checked part.
        words: text of the result.
        hint: next step for the operator; "" if there is none.
    """

    status: Literal["ok", "warn", "fail"]
    name: str
    words: str
    hint: str = ""

    def text(self) -> str:
        """Text of the check, for people."""
        return f"{self.status:4}  {self.name}: {self.words}" + (f"\n      hint: {self.hint}" if self.hint else "")


def examine(raw: Mapping[str, Any] | None) -> Iterator[CheckResult]:
    """Checks this machine, and the tiers of a --kv-transfer-config if there is one.

    Raises:
        ConfigurationError: an engine would refuse the configuration.
    """
    yield from _system()
    if raw is None:
        return
    from hybridkv.connectors import checking

    checking.raise_first(checking.check(raw).problems)
    for _, connector, transfer in checking.connectors_of(raw, []):
        yield from _connector(connector, transfer.get("kv_connector_extra_config") or {})


def _connector(name: str, extra: Mapping[str, Any]) -> Iterator[CheckResult]:
    from hybridkv.connectors.config import DiskTierConfig, ObjectTierConfig, PeerTierConfig, decode_config
    from hybridkv.connectors.vllm import CONNECTOR, LMCACHE_CONNECTOR, PEER_CONNECTOR

    if name == PEER_CONNECTOR:
        yield from _peers(extra.get("secret_file"))
    elif name == LMCACHE_CONNECTOR:
        yield from _lmcache(extra)
    elif name == CONNECTOR:
        for tier in decode_config(extra).secondary.values():
            if isinstance(tier, DiskTierConfig):
                yield from _disk(Path(tier.path), tier.capacity)
            elif isinstance(tier, ObjectTierConfig):
                yield _object(tier)
            elif isinstance(tier, PeerTierConfig):
                yield from _peers(tier.secret_file)


def _peers(secret_file: str | None) -> Iterator[CheckResult]:
    from hybridkv.peers.errors import PeersConfigurationError
    from hybridkv.peers.transport.nixl_library import require_nixl
    from hybridkv.peers.wire import read_secret

    try:
        require_nixl()
        yield CheckResult("ok", "peers", "NIXL is installed")
        if secret_file is not None:
            read_secret(secret_file)
            yield CheckResult("ok", "peers", f"the secret in {secret_file} can be read")
    except PeersConfigurationError as error:
        yield CheckResult("fail", "peers", f"expected {error.expected}, got {error.got}", error.hint)


def _lmcache(extra: Mapping[str, Any]) -> Iterator[CheckResult]:
    from hybridkv.connectors.vllm.lmcache.config import decode_config, parse_url

    config = decode_config(extra)
    address = parse_url(config.url)
    assert address is not None
    for option, port in (("--port", address[1]), ("--http-port", config.http_port)):
        name = f"LMCache's server at {address[0]}:{port}"
        try:
            socket.create_connection((address[0], port), timeout=config.connect_timeout_seconds).close()
        except OSError as error:
            needed = "an engine starts without the server only with chunk_tokens"
            hint = f"start `lmcache server`, or check its {option}; {needed}"
            yield CheckResult("fail" if config.chunk_tokens is None else "warn", name, str(error), hint)
        else:
            yield CheckResult("ok", name, "accepts connections")


def _system() -> Iterator[CheckResult]:
    is_new = tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 11)
    yield CheckResult(
        "ok" if is_new else "fail", "Python", platform.python_version(), "" if is_new else "use 3.11 or newer"
    )
    yield _installed("vllm", "vLLM", "pip install vllm, in the environment of the engine")
    try:
        importlib.import_module("hybridkv.native")
    except ImportError as error:
        yield CheckResult("fail", "hybridkv.native", str(error), "pip install hybridkv-native")
    else:
        yield CheckResult("ok", "hybridkv.native", "can be imported")
    try:
        disabled = Path("/proc/sys/kernel/io_uring_disabled").read_text(encoding="ascii").strip()
    except OSError:
        disabled = ""
    if disabled in ("", "0"):
        yield CheckResult("ok", "io_uring", "not disabled by the kernel's setting")
    else:
        yield CheckResult(
            "warn", "io_uring", f"kernel.io_uring_disabled is {disabled}", "sysctl kernel.io_uring_disabled=0"
        )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    words = "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)
    yield CheckResult("ok", "locked memory", f"{words}; an engine on a GPU may need ulimit -l unlimited")
    with contextlib.suppress(OSError):
        size = shutil.disk_usage("/dev/shm").total
        few = size < _GIB
        hint = "docker run --shm-size=8g, or --ipc=host" if few else ""
        yield CheckResult("warn" if few else "ok", "/dev/shm", format_size(size), hint)


def _installed(package: str, name: str, hint: str) -> CheckResult:
    if importlib.util.find_spec(package) is None:
        return CheckResult("warn", name, f"{package} is not installed", hint)
    for distribution in importlib.metadata.packages_distributions().get(package, ()):
        return CheckResult("ok", name, f"{distribution} {importlib.metadata.version(distribution)}")
    return CheckResult("ok", name, f"{package}, of an unknown version")


def _disk(path: Path, capacity: int) -> Iterator[CheckResult]:
    name, place = f"disk {path}", path if path.is_dir() else path.parent
    try:
        usage = shutil.disk_usage(place)
        fits = usage.free >= capacity or path.is_dir()
        words = f"{format_size(usage.free)} free for a capacity of {format_size(capacity)}"
        yield CheckResult("ok" if fits else "warn", name, words, "" if fits else "lower capacity, or free some space")
        with tempfile.NamedTemporaryFile(dir=place, prefix="hybridkv-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            started_s = time.monotonic()
            os.fsync(file.fileno())
            took_s = time.monotonic() - started_s
            slow = took_s > SLOW_FSYNC_S
            hint = "a local disk is faster" if slow else ""
            yield CheckResult("warn" if slow else "ok", name, f"fsync takes {1000 * took_s:.1f} ms", hint)
            try:
                os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
            except OSError as error:
                yield CheckResult("warn", name, f"O_DIRECT is refused: {error.strerror}", "use ext4 or xfs")
            else:
                yield CheckResult("ok", name, "O_DIRECT can be used")
    except OSError as error:
        yield CheckResult(
            "fail", name, f"{place}: {error.strerror}", "the path or its parent must exist and be writable"
        )


def _object(tier: Any) -> CheckResult:
    from hybridkv.tiers.object.options import ObjectOptions
    from hybridkv.tiers.object.store import check_store, describe, open_object_store

    name = f"object store {tier.url}"
    given = {"endpoint": tier.endpoint, "region": tier.region}
    settings = {key: value for key, value in given.items() if value is not None}
    try:
        if tier.credentials_file is not None:
            settings |= msgspec.json.decode(Path(tier.credentials_file).read_bytes(), type=dict[str, str])
        started_s = time.monotonic()
        refusal = check_store(
            open_object_store(tier.url, settings, ObjectOptions(), tier.secret_file is not None), "doctor"
        )
        took_s = time.monotonic() - started_s
    except Exception as error:  # of obstore and of the libraries below it
        return CheckResult("fail", name, describe(error), "see docs/guides/fleet.md")
    if refusal is not None:
        return CheckResult("warn", name, f"can be read only: {refusal}", "see docs/guides/fleet.md")
    return CheckResult("ok", name, f"conditional put, range and delete work; together they take {1000 * took_s:.0f} ms")
