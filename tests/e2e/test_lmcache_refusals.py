"""Servers of LMCache with which an engine does not start. The error names the problem, a fix, and the setting to
change.

Servers are scripted; a real one reports the same facts (`libs/lmcache`, `test_servers_refused.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import msgspec
import pytest
from harness import make_prompt
from lmcache_site import ENGINE_ARGUMENTS, transfer_config

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import register
from hybridkv.lmcache.connection import ServerAddress
from kits.lmcache.scripted_server import CONFIG, Frames, ScriptedServer, polite
from kits.lmcache.segments import segments_of

RECURRENT = "qwen3-next"
WINDOWS = "gpt-oss"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = harness.scratch_directory(tmp_path_factory.mktemp("refusals"))
    harness.prepare_environment(directory / "environment")
    register()
    return directory


def refused(kind: str, directory: Path, transfer: dict[str, Any]) -> str:
    """The error of an engine that does not start. Clears the process groups that vLLM leaves behind."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    try:
        with (
            pytest.raises(ConfigurationError) as caught,
            harness.running_engine(kind, directory, kv_transfer_config=transfer, **ENGINE_ARGUMENTS.get(kind, {})),
        ):
            pass
    finally:
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
    assert not segments_of(os.getpid())
    return str(caught.value)


def config_page(**config: Any) -> dict[str, bytes]:
    """The /config page of a server with these changes."""
    return {"/config": msgspec.json.encode({"mp": {**CONFIG, **config}})}


def test_an_unknown_version_is_refused(directory: Path) -> None:
    with ScriptedServer(version="0.6.1") as server:
        error = refused(WINDOWS, directory, transfer_config(server.address))
    assert "0.6.1" in error and "0.5.6" in error and "0.5.7rc2" in error


def test_a_chunk_that_does_not_fit_the_engines_blocks_is_refused(directory: Path) -> None:
    with ScriptedServer(version="0.5.6") as server:
        error = refused(RECURRENT, directory, transfer_config(server.address))
    assert "384" in error and "256" in error and "--chunk-size 384" in error


def test_a_server_that_cannot_negotiate_the_chunk_is_refused(directory: Path) -> None:
    """It does not answer unsupported calls."""

    def disagree(name: str, frames: Frames) -> Any:
        return [] if name == "negotiate_chunk_size" else polite(name, frames)

    with ScriptedServer(disagree) as server:
        error = refused(RECURRENT, directory, transfer_config(server.address))
    assert "384" in error and "256" in error and "--chunk-size 384" in error


def test_recurrent_models_are_refused_if_groups_are_stored_together(directory: Path) -> None:
    def agree(name: str, frames: Frames) -> Any:
        if name == "negotiate_chunk_size":
            return [[*frames[:3], msgspec.msgpack.encode(384)]]
        return polite(name, frames)

    with ScriptedServer(agree, pages=config_page(separate_object_groups=False, chunk_size=384)) as server:
        error = refused(RECURRENT, directory, transfer_config(server.address))
    assert "--separate-object-groups" in error


def test_a_pool_smaller_than_a_chunk_is_refused(directory: Path) -> None:
    with ScriptedServer() as server:
        error = refused(WINDOWS, directory, transfer_config(server.address, pool="64KiB"))
    assert "pool" in error and "bytes" in error


def test_an_unknown_key_is_refused(directory: Path) -> None:
    with ScriptedServer() as server:
        error = refused(WINDOWS, directory, transfer_config(server.address, pol="64MiB"))
    assert "pol" in error and "pool" in error


@contextlib.contextmanager
def unused_address() -> Iterator[ServerAddress]:
    """An address where nothing listens while the block runs."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        yield ServerAddress("127.0.0.1", one.getsockname()[1], other.getsockname()[1])


def test_a_missing_server_is_refused(directory: Path) -> None:
    with unused_address() as address:
        error = refused(WINDOWS, directory, transfer_config(address, connect_timeout_seconds=1))
    assert str(address.port) in error and "chunk_tokens" in error


def test_an_engine_with_a_given_chunk_starts_without_a_server_and_computes(directory: Path) -> None:
    """The exception, and the control of `refused`."""
    prompt = make_prompt(600, seed=1)
    with unused_address() as address:
        transfer = transfer_config(address, connect_timeout_seconds=1, chunk_tokens=256)
        with harness.running_engine(WINDOWS, directory, kv_transfer_config=transfer) as engine:
            [first] = engine.generate([prompt])
            engine.reset_prefix_cache()
            [second] = engine.generate([prompt])
    assert second.num_cached_tokens == 0 and second.same_output(first)
