"""One engine per test module; model and kind of load come from the environment of the Bazel target."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
import pytest
from audit import Audit
from harness import SAME_STEPS, Engine
from noise import Noise

if TYPE_CHECKING:
    from lmcache_site import LMCacheSite
    from peers import Two
    from prefix_site import Rows


@pytest.fixture(scope="session", params=os.environ.get("HYBRIDKV_E2E_MODEL", "qwen3-next").split(","))
def kind(request: pytest.FixtureRequest) -> str:
    """Each model named by the target."""
    return str(request.param)


@pytest.fixture(scope="session")
def load() -> str:
    return os.environ.get("HYBRIDKV_E2E_LOAD", "async")


@pytest.fixture(scope="session")
def kv_transfer_config(load: str) -> dict[str, Any]:
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": [{"type": "ram", "capacity": "512MiB"}], "load": load, **SAME_STEPS},
    }


@pytest.fixture(scope="module")
def engine_arguments() -> dict[str, Any]:
    """Changes of a module to the model's usual engine arguments."""
    return {}


@pytest.fixture(scope="module")
def engine(
    kind: str,
    kv_transfer_config: dict[str, Any],
    engine_arguments: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    directory: Path = harness.scratch_directory(tmp_path_factory.mktemp("engine"))
    with harness.running_engine(kind, directory, kv_transfer_config=kv_transfer_config, **engine_arguments) as running:
        yield running


@pytest.fixture(scope="module")
def watching(engine: Engine) -> Audit:
    return Audit(engine).attach()


@pytest.fixture
def audit(engine: Engine, watching: Audit) -> Iterator[Audit]:
    """The audit with cleared counts, over an engine that holds nothing of earlier tests."""
    engine.reset_prefix_cache()
    engine.connector.reset_cache()
    watching.stored.clear()
    watching.forget()
    num_free = engine.num_free_blocks
    yield watching
    engine.reset_prefix_cache()
    assert engine.num_free_blocks == num_free, "the connector kept blocks of the engine"


@pytest.fixture(scope="module")
def noise(engine: Engine) -> Noise:
    return Noise(engine)


@pytest.fixture(scope="session")
def two(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """A producer and a consumer, each in its own process."""
    # Only targets whose tests use this fixture have these files.
    from peers import running_two

    with running_two(kind, harness.scratch_directory(tmp_path_factory.mktemp("peers"))) as pair:
        yield pair


@pytest.fixture(scope="session", params=os.environ.get("HYBRIDKV_E2E_LMCACHE", "0.5.6,0.5.7rc2").split(","))
def site(request: pytest.FixtureRequest, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheSite]:
    """A server of LMCache, of each version."""
    # Only targets whose tests use this fixture have these files.
    from lmcache_site import running_site

    directory = harness.scratch_directory(tmp_path_factory.mktemp("lmcache")) / request.param
    with running_site(request.param, kind, directory) as running:
        yield running


@pytest.fixture(scope="session")
def zoo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the zoo's models and the engine's caches; sets the environment for all engines of this
    process.
    """
    # Only targets whose tests use this fixture have these files.
    import trial

    path = harness.scratch_directory(tmp_path_factory.mktemp("zoo"))
    trial.prepare(path)
    return path


@pytest.fixture(scope="session")
def rows() -> Iterator[Rows]:
    """The tokens that each connector restored for prompts with common prefixes; written to the test's outputs."""
    from prefix_site import Rows

    seen = Rows()
    yield seen
    if outputs := os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR"):
        seen.write(Path(outputs) / "shared_prefixes.json")
