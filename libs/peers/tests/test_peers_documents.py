"""README.md runs as printed."""

import re
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent.parent


def test_the_example_in_the_readme_runs() -> None:
    programs = re.findall(r"```python\n(.*?)```", (LIBRARY / "README.md").read_text(), flags=re.DOTALL)
    assert programs
    for program in programs:
        exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
