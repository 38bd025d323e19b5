"""The pictures of the pages are drawn from their sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[2]
FOLDER = ROOT / "docs" / "pictures"
SOURCES = sorted(path.name for path in FOLDER.glob("*.txt"))


def draw(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "pictures.py"), str(folder)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_each_picture_has_a_source() -> None:
    assert SOURCES
    assert sorted(path.name for path in FOLDER.glob("*.svg")) == [name.replace(".txt", ".svg") for name in SOURCES]


@pytest.mark.parametrize("source", SOURCES)
def test_a_picture_matches_its_source(source: str, tmp_path: Path) -> None:
    shutil.copyfile(FOLDER / source, tmp_path / source)
    assert draw(tmp_path).returncode == 0
    picture = source.replace(".txt", ".svg")
    assert (tmp_path / picture).read_text() == (FOLDER / picture).read_text(), "run tools/pictures.py docs/pictures"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"box one 0 0 1 {'long ' * 20}", "wider"),
        ("box one 0 0 1 One\narrow one two", "which is no box"),
        ("columns 2 100 50\nbox one 0 0 1 One\nbox two 1 1 1 Two\narrow one two", "neither a row nor a column"),
        ("circle one 0 0 1 One", "unknown item"),
    ],
)
def test_a_source_that_cannot_be_drawn_is_an_error(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.txt").write_text(source + "\n")
    ended = draw(tmp_path)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert not (tmp_path / "wrong.svg").exists()
