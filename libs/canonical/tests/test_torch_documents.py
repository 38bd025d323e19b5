"""README.md runs as printed."""

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_in_the_readme_runs() -> None:
    [program] = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
