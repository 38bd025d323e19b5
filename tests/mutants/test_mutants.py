"""Each mutant still matches the code that it changes."""

from __future__ import annotations

import pathlib

import pytest

from mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_line_of_a_mutant_occurs_exactly_once(mutant: Mutant) -> None:
    source = pathlib.Path(mutant.path).read_text()
    assert mutant.applied(source) != source
    assert len(mutant.applied(source).split("\n")) == len(source.split("\n"))


def test_a_missing_line_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 0 lines"):
        MUTANTS[0].applied("")
