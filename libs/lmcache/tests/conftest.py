"""Properties have no time limit, and neither has generating their examples, since the machine may be busy."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from real_servers import lmcache_of

from hybridkv.lmcache.wire import CODECS
from kits.lmcache.server_process import ServerProcess

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="module", params=sorted(CODECS))
def version(request: pytest.FixtureRequest) -> str:
    """Version of the server."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of each version, with states and windows in separate object groups."""
    directory: Path = tmp_path_factory.mktemp("lmcache")
    with ServerProcess(lmcache_of(version), directory, ["--chunk-size", "256", "--separate-object-groups"]) as process:
        yield process
