"""Each row of the comparison with vLLM's connector has a verdict and names an existing test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridkv.metrics import PEER_FAILURES

ROOT = Path(__file__).absolute().parents[2]
PAGE = (ROOT / "docs/reference/nixl.md").read_text(encoding="utf-8")
VERDICTS = ("same", "better", "refused")


def rows(text: str) -> list[list[str]]:
    """The rows of all tables, without the heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [each for each in cells if each[0].strip() not in ("behaviour", "---")]


def complaints(row: list[str]) -> list[str]:
    """Errors in a row."""
    if len(row) != 4:
        return [f"{len(row)} cells: {row}"]
    found = [] if row[2].startswith(VERDICTS) else [f"neither of {VERDICTS}: {row[2]}"]
    named = re.findall(r"`([\w./]+\.py)::(\w+)`", row[3])
    for path, name in named:
        file = ROOT / path
        if not file.is_file() or f"\ndef {name}(" not in file.read_text(encoding="utf-8"):
            found.append(f"no test {path}::{name}")
    return found or ([] if named else [f"no test is named: {row}"])


def test_there_are_rows_of_each_verdict() -> None:
    assert {verdict for row in rows(PAGE) for verdict in VERDICTS if row[2].startswith(verdict)} == set(VERDICTS)


@pytest.mark.parametrize("row", rows(PAGE), ids=lambda row: row[0])
def test_each_row_names_an_existing_test(row: list[str]) -> None:
    assert complaints(row) == []


@pytest.mark.parametrize(
    "row",
    [
        ["a", "b", "same", "`tests/oracle/test_peers.py::test_that_nobody_wrote`"],
        ["a", "b", "same", "`tests/oracle/nowhere.py::test_a_prompt_of_any_length_is_handed_over`"],
        ["a", "b", "like it", "`tests/oracle/test_peers.py::test_a_prompt_of_any_length_is_handed_over`"],
        ["a", "b", "better", "by reading"],
        ["a", "b", "better"],
    ],
    ids=str,
)
def test_an_incomplete_row_is_found(row: list[str]) -> None:
    assert complaints(row)


def test_the_guide_explains_each_failure_reason_of_a_read() -> None:
    guide = (ROOT / "docs/guides/peers.md").read_text(encoding="utf-8")
    table = guide.partition("| reason | what it means |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(PEER_FAILURES)
