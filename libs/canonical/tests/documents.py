"""The programs that README.md prints."""

import re
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent.parent


def programs(with_torch: bool) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (LIBRARY / "README.md").read_text(), flags=re.DOTALL)
    return [program for program in found if program.startswith("# needs torch") == with_torch]


def run(program: str) -> None:
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
