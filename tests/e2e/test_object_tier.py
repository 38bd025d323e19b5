"""An engine restores from an object store what another one stored, with equal tokens and log-probabilities.

Runs a real object server. Changed objects, and objects of another fleet or tenant, are not used; the prompts are
computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import object_tier_process
import obstore
import pytest
import restart_process
from equality import require_same_written
from harness import scratch_directory
from obstore.store import from_url
from one_life import Life, one_life

from hybridkv.tiers.object.format.record import HEADER_BYTES
from kits.tiers.object_server import BUCKET, VARIABLE, ObjectServer, command


class Fleet:
    """One server, and engines that run one after the other."""

    def __init__(self, kind: str, server: ObjectServer, directory: Path) -> None:
        self.url = f"s3://{BUCKET}/{kind}"
        self._kind, self._server, self._directory = kind, server, directory
        options: Any = {"allow_http": True}
        self.store = from_url(self.url, **server.settings(), client_options=options)

    def secret(self, name: str) -> str:
        path = self._directory / name
        if not path.exists():
            path.write_text(name * 8)
            path.chmod(0o600)
        return str(path)

    def names(self, kind: str) -> list[str]:
        """Names of packs ('p') or manifests ('m')."""
        found = [each["path"] for page in obstore.list(self.store) for each in page]
        return [path for path in found if path.split("/")[1] == kind]

    def damage(self) -> None:
        """Change one bit of every chunk. The number of chunks per pack depends on the load of the machine."""
        for name in self.names("p"):
            data = bytearray(obstore.get(self.store, name).bytes())
            for at in range(0, len(data), HEADER_BYTES):
                data[at] ^= 1
            obstore.put(self.store, name, bytes(data), use_multipart=False)

    def live(self, **options: Any) -> Life:
        """Run one engine."""
        settings = self._server.settings()
        asked = {"url": self.url, "endpoint": settings.pop("endpoint"), "region": settings.pop("region"), **options}
        environment = {f"AWS_{name.upper()}": value for name, value in settings.items()}
        tier = ["--tier", json.dumps(asked)]
        life = one_life(object_tier_process.main, self._kind, self._directory, *tier, environment=environment)
        assert settings["secret_access_key"] not in life.log
        return life


@pytest.fixture(
    scope="module",
    params=["qwen3-next", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("gemma3", "gpt-oss"))],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def fleet(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    weed = command()
    if weed is None:
        pytest.skip(f"{VARIABLE} does not name an object server")
    directory = scratch_directory(tmp_path_factory.mktemp("fleet")) / f"fleet-{kind}"
    directory.mkdir()
    with ObjectServer(weed, directory / "server") as server:
        yield Fleet(kind, server, directory)


@pytest.fixture(scope="module")
def cold(fleet: Fleet) -> Life:
    """The results of the first engine."""
    return fleet.live(secret_file=fleet.secret("one"))


def test_an_engine_restores_what_another_stored_in_the_object_store(fleet: Fleet, cold: Life, kind: str) -> None:
    assert cold.cached == [0, 0, 0]
    assert fleet.names("p") and fleet.names("m"), cold.log
    warm = fleet.live(secret_file=fleet.secret("one"))
    for cached, prompt in zip(warm.cached, restart_process.prompts(kind), strict=True):
        assert len(prompt) - 256 <= cached < len(prompt), warm.log
    require_same_written(cold.results, warm.results)


@pytest.mark.full
def test_an_engine_of_another_fleet_restores_nothing(fleet: Fleet, cold: Life) -> None:
    other = fleet.live(secret_file=fleet.secret("two"))
    assert other.cached == [0, 0, 0]
    require_same_written(cold.results, other.results)


@pytest.mark.full
def test_chunks_with_a_changed_bit_are_recomputed(fleet: Fleet, cold: Life) -> None:
    """Runs last because it leaves a damaged store."""
    fleet.damage()
    wrong = fleet.live(secret_file=fleet.secret("one"))
    require_same_written(cold.results, wrong.results)
    assert wrong.cached == [0, 0, 0], "all loaded bytes are as they were stored"
