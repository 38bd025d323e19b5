"""Each family of models that cannot be resumed on this machine: the engine does not start, and the error has the
reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import trial as trials
from families import FAMILIES, Family
from rows import Row

from hybridkv.connectors.errors import ConfigurationError

HERE = [family for family in FAMILIES if not family.served_here(trials.has_amx())]


@pytest.mark.parametrize("family", HERE, ids=lambda family: family.name)
def test_a_family_that_cannot_be_resumed_is_refused_with_its_reason(
    family: Family, directory: Path, rows: dict[str, Row]
) -> None:
    with pytest.raises(ConfigurationError) as refusal, trials.running(family, directory):
        pass
    said = refusal.value
    assert family.refusal in str(said)
    rows.setdefault(family.name, Row()).refusal = f"{said.path}: {said.got}"
