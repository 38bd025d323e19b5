"""What one engine stored at a server of LMCache the next one serves: with equal tokens and log-probabilities.

The server is killed between the two, and its disk has it still. What its disk gives back changed is computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import lmcache_tier_process
import pytest
import restart_process
from equality import require_same_written
from harness import scratch_directory
from one_life import Life, one_life

from hybridkv.lmcache.wire import CODECS
from kits.lmcache.server_process import ServerProcess, command, eventually, variable


class Fleet:
    """One server, and engines one after the other."""

    def __init__(self, kind: str, lmcache: list[str], directory: Path) -> None:
        self.disk = directory / "disk"
        self.disk.mkdir()
        self._kind, self._lmcache, self._directory = kind, lmcache, directory
        self.server = ServerProcess(lmcache, directory, self._arguments())
        self.server.wait()

    def _arguments(self) -> list[str]:
        disk = json.dumps({"type": "fs_native", "base_path": str(self.disk)})
        return ["--chunk-size", "256", "--l2-adapter", disk]

    def restart(self) -> None:
        """As after a crash: what its disk has is what it has."""
        self.server.kill()
        self.server = ServerProcess(self._lmcache, self._directory, self._arguments(), self.server.address)
        self.server.wait()

    def is_written(self) -> bool:
        """Whether all that it was given is on its disk."""
        status = self.server.status()["storage_manager"]
        writing = status["store_controller"]
        is_idle = not writing["pending_keys_count"] and not writing["in_flight_task_count"]
        return is_idle and len(self.files()) >= status["l1_manager"]["total_object_count"] > 0

    def files(self) -> list[Path]:
        return sorted(path for path in self.disk.rglob("*") if path.is_file() and ".tmp" not in path.name)

    def live(self) -> Life:
        """One engine's life."""
        address = self.server.address
        where = ["--url", f"tcp://{address.host}:{address.port}", "--http-port", str(address.http_port)]
        return one_life(lmcache_tier_process.main, self._kind, self._directory, *where)


@pytest.fixture(scope="module", params=sorted(CODECS))
def fleet(request: pytest.FixtureRequest, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    lmcache = command(request.param)
    if lmcache is None:
        pytest.skip(f"{variable(request.param)} names no lmcache of version {request.param}")
    directory = scratch_directory(tmp_path_factory.mktemp("lmcache")) / request.param
    directory.mkdir()
    fleet = Fleet(kind, lmcache, directory)
    yield fleet
    fleet.server.kill()


def test_an_engine_restores_from_a_server_what_another_stored_there(fleet: Fleet, kind: str) -> None:
    cold = fleet.live()
    assert cold.cached == [0, 0, 0]
    assert eventually(fleet.is_written)
    fleet.restart()
    warm = fleet.live()
    for cached, prompt in zip(warm.cached, restart_process.prompts(kind), strict=True):
        assert len(prompt) - 256 <= cached < len(prompt), warm.log
    require_same_written(cold.results, warm.results)
    fleet.server.kill()
    for path in fleet.files():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    fleet.restart()
    wrong = fleet.live()
    require_same_written(cold.results, wrong.results)
    assert wrong.cached == [0, 0, 0], "every byte that is loaded is one that was stored"
