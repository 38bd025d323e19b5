"""Real LMCache servers for the oracle. A server starts at its first use, and stays."""

from __future__ import annotations

import enum
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import patience
import pytest

from hybridkv.connectors.vllm.lmcache import session_spec
from hybridkv.lmcache.connection import ConnectionOptions
from hybridkv.lmcache.wire import CODECS
from kits.lmcache.server_process import ServerProcess, command, eventually, variable

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSIONS = sorted(CODECS)
SETTLED_S = patience.seconds(6.0)
"""The machine may stall for a while; only a leak lasts this long."""


_ROOM = ("--l1-size-gb", "0.1")


class Sort(enum.Enum):
    """Kinds of servers for scenarios: chunk size and arguments."""

    APART = 32, ("--separate-object-groups", *_ROOM)
    TOGETHER = 128, ("--no-separate-object-groups", *_ROOM)
    SMALL = 128, ("--separate-object-groups", "--l1-size-gb", "0.0003", "--eviction-ratio", "0.5")
    """Evicts all the time."""
    MORTAL = 128, ("--separate-object-groups", *_ROOM)
    """Is stopped and killed."""

    @property
    def chunk_tokens(self) -> int:
        return self.value[0]

    @property
    def arguments(self) -> Sequence[str]:
        return ["--chunk-size", str(self.chunk_tokens), *self.value[1]]


class Server:
    """A server that may be killed and started again at the same address."""

    def __init__(self, lmcache: Sequence[str], directory: Path, sort: Sort) -> None:
        self.sort = sort
        self._lmcache, self._directory = lmcache, directory / sort.name
        self._directory.mkdir()
        self._before: dict[str, int] = {}
        self.process = ServerProcess(lmcache, self._directory, sort.arguments)
        self.address = self.process.address

    @property
    def url(self) -> str:
        return f"tcp://{self.address.host}:{self.address.port}"

    def start_again(self) -> None:
        """Restarts it at the same address, empty; does not wait for it."""
        self._before = {}
        self.process.kill()
        self.process = ServerProcess(self._lmcache, self._directory, self.sort.arguments, self.address)

    def held(self) -> dict[str, int]:
        """Sessions and locks that the server holds."""
        status = self.process.status()
        manager = status["storage_manager"]
        found = {"sessions": status["active_sessions"]}
        for l1 in manager.get("l1_managers", {"": manager["l1_manager"]}).values():
            for name in ("write_locked_count", "read_locked_count"):
                found[name] = found.get(name, 0) + l1[name]
        over = {name: number - self._before.get(name, 0) for name, number in found.items()}
        return {name: number for name, number in over.items() if number > 0}

    def num_objects(self) -> int:
        """Number of objects of all caches."""
        return int(self.process.status()["storage_manager"]["l1_manager"]["total_object_count"])

    def begin(self) -> None:
        """Ignores what an earlier test left here on purpose."""
        self._before = {}
        self._before = self.held()

    def is_at_rest(self) -> bool:
        """Whether it holds no session and no lock, at least soon."""
        return eventually(lambda: not self.held(), SETTLED_S)


class Fleet:
    """One server of each kind, of one version. Each starts when it is first used."""

    def __init__(self, version: str, lmcache: Sequence[str]) -> None:
        self.version = version
        self._lmcache = lmcache
        self._directory = tempfile.TemporaryDirectory()
        self._servers: dict[Sort, Server] = {}

    def __getitem__(self, sort: Sort) -> Server:
        if sort not in self._servers:
            self._servers[sort] = Server(self._lmcache, Path(self._directory.name), sort)
            self._servers[sort].process.wait()
        return self._servers[sort]

    def close(self) -> None:
        for server in self._servers.values():
            server.process.kill()
        self._directory.cleanup()


_fleets: dict[str, Fleet] = {}
"""Of this process: several modules use the same ones."""


def fleet_of(version: str, config: pytest.Config) -> Fleet:
    """The servers of a version until the end of the tests. Skips the test where that version is not installed."""
    lmcache = command(version)
    if lmcache is None:
        pytest.skip(f"{variable(version)} names no lmcache of version {version}")
    if version not in _fleets:
        _fleets[version] = Fleet(version, lmcache)
        config.add_cleanup(_fleets[version].close)
    return _fleets[version]


def impatient(patch: pytest.MonkeyPatch) -> None:
    """A lost server is tried all the time, and a silent one is given up soon."""

    def options(**bounds: Any) -> ConnectionOptions:
        return ConnectionOptions(
            call_timeout_s=patience.seconds(0.4), max_missed_beats=2, retry_s=0.05, retry_max_s=0.2, **bounds
        )

    patch.setattr(session_spec, "ConnectionOptions", options)
