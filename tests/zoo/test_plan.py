"""`hybridkv plan` says of each family what its engine says at the start, or refuses it in the same words."""

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
"""Families for which the engine chooses the size of its blocks too, by its platform and the size of states."""


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
def test_the_plan_is_what_the_engine_logs_at_its_start(family: Family, directory: Path) -> None:
    check_plan(family, directory, family.arguments | family.needs)


@pytest.mark.parametrize(
    "family", [family for family in SERVED if family.name in CHOOSES_BLOCKS], ids=lambda family: family.name
)
def test_so_it_is_where_the_engine_chooses_the_size_of_blocks(family: Family, directory: Path) -> None:
    arguments = family.arguments | family.needs | {"max_model_len": 2048}
    check_plan(family, directory, {name: value for name, value in arguments.items() if name != "block_size"})


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_a_family_that_the_engine_refuses_is_refused_in_the_same_words(family: Family, directory: Path) -> None:
    model = model_of(family, directory)
    with pytest.raises(ConfigurationError) as planning:
        planned(model, family.arguments | family.needs, trials.KV_TRANSFER_CONFIG)
    with pytest.raises(ConfigurationError) as starting, trials.running(family, directory):
        pass
    assert str(planning.value) == str(starting.value)
