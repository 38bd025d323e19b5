"""For each family, `hybridkv plan` prints the same lines as its engine logs at startup, or refuses it with the same
error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import trial as trials
from families import FAMILIES, Family
from plans import planned, start_lines

from hybridkv.connectors.errors import ConfigurationError

SERVED = [family for family in FAMILIES if family.served_here(trials.has_amx())]
REFUSED = [family for family in FAMILIES if family not in SERVED]
CHOOSES_BLOCKS: Final = ("gemma-4", "lfm2", "qwen3-next", "granite-4")
"""Families for which the engine also chooses the block size, by its platform and the size of states."""


def model_of(family: Family, directory: Path) -> Path:
    model = directory / family.name
    family.write(model)
    return model


def check_plan(family: Family, directory: Path, arguments: dict[str, Any]) -> None:
    """Compares the plan with the log of an engine."""
    transfer = trials.KV_TRANSFER_CONFIG
    startup = planned(model_of(family, directory), arguments, transfer).startup
    with start_lines() as lines, trials.running_with(family, directory / family.name, transfer, arguments):
        pass
    [line] = [line for line in lines if "groups 0 " in line]
    assert line.rpartition("; cache ")[0] == startup.line
    assert [line for line in lines if line in startup.notes] == list(startup.notes)
    assert [line for line in lines if line in startup.warnings] == list(startup.warnings)


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_the_plan_equals_the_startup_log_of_the_engine(family: Family, directory: Path) -> None:
    check_plan(family, directory, family.arguments | family.needs)


@pytest.mark.parametrize(
    "family", [family for family in SERVED if family.name in CHOOSES_BLOCKS], ids=lambda family: family.name
)
def test_the_plan_equals_the_log_if_the_engine_chooses_the_block_size(family: Family, directory: Path) -> None:
    arguments = family.arguments | family.needs | {"max_model_len": 2048}
    check_plan(family, directory, {name: value for name, value in arguments.items() if name != "block_size"})


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_the_plan_refuses_a_family_with_the_error_of_the_engine(family: Family, directory: Path) -> None:
    model = model_of(family, directory)
    with pytest.raises(ConfigurationError) as planning:
        planned(model, family.arguments | family.needs, trials.KV_TRANSFER_CONFIG)
    with pytest.raises(ConfigurationError) as starting, trials.running(family, directory):
        pass
    assert str(planning.value) == str(starting.value)
