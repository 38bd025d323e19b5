"""Servers of LMCache with which no engine starts: the error says what is, what would fit, and where to say it.

Servers are scripted: a real one says the same of itself (`libs/lmcache`, `test_servers_refused.py`).
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
    """The error with which an engine does not start. vLLM leaves its process groups behind; they are cleared."""
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


def says(**config: Any) -> dict[str, bytes]:
    """What a server's /config is, but for this."""
    return {"/config": msgspec.json.encode({"mp": {**CONFIG, **config}})}


def test_a_version_that_nobody_knows(directory: Path) -> None:
    with ScriptedServer(version="0.6.1") as server:
        error = refused(WINDOWS, directory, transfer_config(server.address))
    assert "0.6.1" in error and "0.5.6" in error and "0.5.7rc2" in error


def test_a_chunk_that_the_engines_blocks_do_not_fit(directory: Path) -> None:
    with ScriptedServer(version="0.5.6") as server:
        error = refused(RECURRENT, directory, transfer_config(server.address))
    assert "384" in error and "256" in error and "--chunk-size 384" in error


def test_a_server_that_cannot_agree_on_a_chunk(directory: Path) -> None:
    """It says nothing to what it cannot do."""

    def disagree(name: str, frames: Frames) -> Any:
        return [] if name == "negotiate_chunk_size" else polite(name, frames)

    with ScriptedServer(disagree) as server:
        error = refused(RECURRENT, directory, transfer_config(server.address))
    assert "384" in error and "256" in error and "--chunk-size 384" in error


def test_states_where_a_server_keeps_all_groups_together(directory: Path) -> None:
    def agree(name: str, frames: Frames) -> Any:
        if name == "negotiate_chunk_size":
            return [[*frames[:3], msgspec.msgpack.encode(384)]]
        return polite(name, frames)

    with ScriptedServer(agree, pages=says(separate_object_groups=False, chunk_size=384)) as server:
        error = refused(RECURRENT, directory, transfer_config(server.address))
    assert "--separate-object-groups" in error


def test_a_pool_that_has_no_room_for_a_chunk(directory: Path) -> None:
    with ScriptedServer() as server:
        error = refused(WINDOWS, directory, transfer_config(server.address, pool="64KiB"))
    assert "pool" in error and "bytes" in error


def test_a_key_that_nobody_knows(directory: Path) -> None:
    with ScriptedServer() as server:
        error = refused(WINDOWS, directory, transfer_config(server.address, pol="64MiB"))
    assert "pol" in error and "pool" in error


@contextlib.contextmanager
def nobody() -> Iterator[ServerAddress]:
    """Where nobody listens, and nobody will as long as the block lasts."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        yield ServerAddress("127.0.0.1", one.getsockname()[1], other.getsockname()[1])


def test_no_server(directory: Path) -> None:
    with nobody() as address:
        error = refused(WINDOWS, directory, transfer_config(address, connect_timeout_seconds=1))
    assert str(address.port) in error and "chunk_tokens" in error


def test_no_server_and_a_chunk_that_was_given_is_an_engine_that_computes(directory: Path) -> None:
    """The exception, and the control of `refused`."""
    prompt = make_prompt(600, seed=1)
    with nobody() as address:
        transfer = transfer_config(address, connect_timeout_seconds=1, chunk_tokens=256)
        with harness.running_engine(WINDOWS, directory, kv_transfer_config=transfer) as engine:
            [first] = engine.generate([prompt])
            engine.reset_prefix_cache()
            [second] = engine.generate([prompt])
    assert second.num_cached_tokens == 0 and second.same_output(first)
