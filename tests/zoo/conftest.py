"""One engine for each family, one after the other in one process, and one record of the results of all families."""

import os
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
import trial as trials
from families import FAMILIES, Family
from rows import Row, write_rows
from trial import Trial


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of models and caches. The environment of the engines is set."""
    path = harness.scratch_directory(tmp_path_factory.mktemp("zoo"))
    trials.prepare(path)
    return path


@pytest.fixture(scope="session")
def rows() -> Iterator[dict[str, Row]]:
    """This run's row of each family, written to a file for the author of the page."""
    seen: dict[str, Row] = {}
    yield seen
    # Bazel keeps files there; outside of Bazel the user names a directory.
    if outputs := os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR"):
        write_rows(seen, Path(outputs) / "rows.json")


@pytest.fixture(
    scope="module", params=[family for family in FAMILIES if family.served_here(trials.has_amx())], ids=lambda f: f.name
)
def family(request: pytest.FixtureRequest) -> Family:
    """A family that the connector must serve on this machine."""
    family: Family = request.param
    return family


@pytest.fixture
def row(family: Family, rows: dict[str, Row]) -> Row:
    """This run's row of the family."""
    return rows.setdefault(family.name, Row())


@pytest.fixture(scope="module")
def engine_of_family(family: Family, directory: Path) -> Iterator[Trial]:
    with trials.running(family, directory) as running:
        yield running


@pytest.fixture
def trial(engine_of_family: Trial) -> Iterator[Trial]:
    with engine_of_family.for_one_test() as trial:
        yield trial
