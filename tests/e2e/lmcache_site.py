"""A server of LMCache with a disk, which tests can stop, kill and damage, and the engine's configuration for it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import patience
import pytest

from hybridkv.lmcache.connection import ServerAddress
from kits.lmcache.server_process import ServerProcess, command, eventually, variable

CHUNK_TOKENS = {"gemma3": 256, "gpt-oss": 256, "qwen3-next": 384}
"""The server's chunk for each model."""
ENGINE_ARGUMENTS: dict[str, dict[str, Any]] = {"qwen3-next": {"block_size": 384, "max_num_batched_tokens": 512}}
"""Additional engine arguments. A server's usual chunk is not a multiple of these blocks, nor of the blocks that vLLM
uses for the states of a large model.
"""
NEGOTIATES = {"0.5.6": False, "0.5.7rc2": True}
"""Whether a server accepts the chunk that an engine needs."""
PATIENCE = dict.fromkeys(
    ("lookup_timeout_seconds", "load_timeout_seconds", "store_timeout_seconds"), patience.seconds(30.0)
)
"""A slow server must not change the result."""


def prompt_lengths(kind: str, count: int = 3, remainder: int = 40) -> list[int]:
    """Lengths of prompts that end shortly after a chunk of the server; the first ends after the second chunk."""
    return [CHUNK_TOKENS[kind] * (number + 2) + remainder for number in range(count)]


def transfer_config(address: ServerAddress, **extra: Any) -> dict[str, Any]:
    """An engine's `kv_transfer_config`."""
    where = {"url": f"tcp://{address.host}:{address.port}", "http_port": address.http_port}
    small = {"pool": "64MiB", "connect_timeout_seconds": patience.seconds(12.0), "heartbeat_seconds": 0.2}
    return {
        "kv_connector": "HybridLMCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**where, **small, **PATIENCE, **extra},
    }


class LMCacheSite:
    """A server and its disk.

    Args:
        version: version of the server.
        kind: the model, which determines the chunk.
        directory: for all files.
    """

    def __init__(self, version: str, kind: str, directory: Path) -> None:
        self.version = version
        self.disk = directory / "disk"
        self.disk.mkdir(parents=True)
        self._kind, self._directory = kind, directory
        self._server: ServerProcess | None = None
        self._address: ServerAddress | None = None
        self.start()

    @property
    def separate_objects(self) -> bool:
        """Whether full attention and other groups are stored separately. States require it; without states both ways
        are tested, each with one version.
        """
        return self._kind == "qwen3-next" or NEGOTIATES[self.version]

    @property
    def server(self) -> ServerProcess:
        """The server that is running, or ran last."""
        assert self._server is not None
        return self._server

    def start(self) -> None:
        """Start on the address and the disk of the previous server. Returns when it answers."""
        disk = json.dumps({"type": "fs_native", "base_path": str(self.disk)})
        arguments = ["--l2-adapter", disk, *(["--separate-object-groups"] if self.separate_objects else [])]
        chunk_tokens = 256 if NEGOTIATES[self.version] else CHUNK_TOKENS[self._kind]
        arguments += ["--chunk-size", str(chunk_tokens)]
        lmcache = command(self.version)
        assert lmcache is not None
        self._server = ServerProcess(lmcache, self._directory, arguments, self._address)
        self._address = self._server.wait().address

    def transfer(self, **extra: Any) -> dict[str, Any]:
        """An engine's `kv_transfer_config`."""
        return transfer_config(self.server.address, **extra)

    def kill(self) -> None:
        """Kill the server as a crash would, even if it is frozen."""
        self.server.signal(signal.SIGKILL)
        self.server.kill()

    def restart(self) -> None:
        """Restart after a crash; the disk keeps its content."""
        self.kill()
        self.start()

    def freeze(self) -> None:
        """The server accepts connections and answers nothing. Returns when all its threads are stopped."""
        self.server.signal(signal.SIGSTOP)
        assert eventually(lambda: set(self._process_states()) <= {"T", "Z"}), "it does not stop"

    def thaw(self) -> None:
        self.server.signal(signal.SIGCONT)

    def is_quiet(self) -> bool:
        """Whether everything that it received can be read and is on its disk."""
        storage = self.server.status()["storage_manager"]
        memory, writer = storage["l1_manager"], storage["store_controller"]
        is_written = not writer["pending_keys_count"] and not writer["in_flight_task_count"]
        return (
            not memory["write_locked_count"] and is_written and len(self.files()) >= int(memory["total_object_count"])
        )

    def files(self) -> list[Path]:
        """The complete files on the disk."""
        return sorted(path for path in self.disk.rglob("*") if path.is_file() and ".tmp" not in path.name)

    def object_group(self, path: Path) -> str:
        """The groups of the engine that a file holds, as numbered by the server."""
        return path.name.split("@")[2]

    def _process_states(self) -> Iterator[str]:
        """The states, as in `man proc`, of all processes of the server."""
        leader = self.server._process.pid
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group, *_ = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has ended
            if int(group) == leader:
                yield state


def flip_a_byte(path: Path) -> None:
    """Change a byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@contextmanager
def running_site(version: str, kind: str, directory: Path) -> Iterator[LMCacheSite]:
    """A server until the block ends. Skips the test if this version is not available."""
    if command(version) is None:
        pytest.skip(f"{variable(version)} names no lmcache of version {version}")
    site = LMCacheSite(version, kind, directory)
    try:
        yield site
    finally:
        site.kill()
