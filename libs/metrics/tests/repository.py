"""Files of the repository that are generated from the declarations."""

from __future__ import annotations

from pathlib import Path

import pytest


def generated(path: str) -> str:
    """The checked-in file, wherever the tests run; skips where it is not there, as in a bare copy of the library."""
    for folder in Path(__file__).resolve().parents:
        if (folder / path).is_file():
            return (folder / path).read_text(encoding="utf-8")
    pytest.skip(f"{path} is not among the files of this run")
