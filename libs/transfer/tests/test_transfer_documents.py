"""The example of README.md runs as printed, and CONTRACT.md names only existing tests."""

from __future__ import annotations

import re
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent.parent


def test_the_example_in_the_readme_runs() -> None:
    programs = re.findall(r"```python\n(.*?)```", (LIBRARY / "README.md").read_text(), flags=re.DOTALL)
    assert programs
    for program in programs:
        exec(compile(program, "README.md", "exec"), {"__name__": "readme"})


def test_every_claim_of_the_contract_names_an_existing_test() -> None:
    claims = [line for line in (LIBRARY / "CONTRACT.md").read_text().splitlines() if line.startswith("- ")]
    sources = LIBRARY.glob("tests/*.py")
    known = set(re.findall(r"def (test_\w+)\(", "\n".join(path.read_text() for path in sources)))
    assert claims
    for claim in claims:
        named = re.findall(r"`(test_\w+)`", claim)
        assert named, f"no test is named: {claim}"
        assert set(named) <= known, claim
