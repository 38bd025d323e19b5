"""The reference page matches the results of this run. The module runs last, in the process of the others."""

from __future__ import annotations

from pathlib import Path

import page
import pytest
from families import FAMILIES
from rows import Row, read_rows, write_rows

PAGE = "docs/reference/models.md"
HINT = f"run: python tests/zoo/page.py rows.json > {PAGE}, with the rows.json among this test's outputs"


def checked_in() -> str:
    for folder in Path(__file__).resolve().parents:
        if (folder / PAGE).is_file():
            return (folder / PAGE).read_text(encoding="utf-8")
    pytest.fail(f"{PAGE} is not among the files of this run")


def test_the_page_matches_the_results_of_this_run(rows: dict[str, Row]) -> None:
    seen = [family for family in FAMILIES if family.name in rows and rows[family.name].is_complete]
    if len(seen) < len(FAMILIES):
        missing = [family.name for family in FAMILIES if family not in seen]
        pytest.skip(f"this run has no complete row of {', '.join(missing)}: they were left out, or failed")
    expected, found = page.render(rows), checked_in()
    aside = [family for family in FAMILIES if page.depends_on_machine(family)]
    assert lines(found, aside) == lines(expected, aside), HINT


def lines(text: str, aside: list[page.Family]) -> list[str]:
    """The page's lines, without the rows that may differ on another machine."""
    titles = tuple(f"| {family.title}: {family.note} |" for family in aside)
    return [line for line in text.splitlines() if not line.startswith(titles)]


def test_a_page_with_a_missing_family_is_not_written(tmp_path: Path) -> None:
    complete = {family.name: Row(refusal="why") for family in FAMILIES}
    write_rows(complete | {"llama": Row(groups="1 FULL")}, tmp_path / "rows.json")
    with pytest.raises(ValueError, match="no complete row of llama"):
        page.render(read_rows(tmp_path / "rows.json"))
