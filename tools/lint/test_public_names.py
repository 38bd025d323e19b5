"""The tree follows the rule of public_names.py, and the rule detects each violation."""

from __future__ import annotations

from pathlib import Path

import pytest
from public_names import Library, libraries_of, range_problems

TREE = Path(__file__).resolve().parents[2]
LIBRARIES = libraries_of(TREE)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.folder.name)
def test_a_library_has_its_recorded_version_and_names(library: Library) -> None:
    assert library.check() == []


def test_version_ranges_between_libraries_include_their_versions() -> None:
    assert range_problems(LIBRARIES) == []


def library(
    folder: Path, names: list[str], version: str = "0.1.0", changelog: str = "## 0.1.0, 1 May 2027\n"
) -> Library:
    package = folder / "src/hybridkv/thing"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(f"__all__ = {names!r}\n")
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "hybridkv-thing"\nversion = "{version}"\ndependencies = []\n'
    )
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n" + changelog)
    return Library(folder, folder / "CHANGELOG.md")


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A library that was released with two names."""
    first = library(tmp_path, ["keep", "lose"])
    first.write()
    assert first.check() == []
    return tmp_path


def test_a_version_missing_in_the_changelog_is_found(released: Path) -> None:
    [problem] = library(released, ["keep", "lose"], version="0.1.1").check()
    assert "version 0.1.1 in pyproject.toml, 0.1.0 on top of the CHANGELOG" in problem


def test_a_new_name_is_recorded_with_its_version(released: Path) -> None:
    changed = library(released, ["keep", "lose", "new"], "0.1.1", "## 0.1.1, unreleased\n## 0.1.0, 1 May 2027\n")
    assert "hybridkv.thing.new is new" in changed.check()[0]
    changed.write()
    assert changed.check() == []
    assert ("0.1.1", "", "hybridkv.thing.new") in changed.record()


@pytest.mark.parametrize(
    ("version", "entry", "expected"),
    [
        ("0.1.0", "", ["is gone: a new version"]),
        ("0.1.1", "- `lose` is gone\n", ["raise the second number"]),
        ("0.2.0", "- better\n", ["does not have the name"]),
        ("0.2.0", "- `lose` is gone\n", []),
    ],
)
def test_removing_a_released_name_needs_a_version_and_a_changelog_line(
    released: Path, version: str, entry: str, expected: list[str]
) -> None:
    old = "## 0.1.0, 1 May 2027\n"
    changelog = old if version == "0.1.0" else f"## {version}, unreleased\n{entry}{old}"
    changed = library(released, ["keep"], version, changelog)
    assert "hybridkv.thing.lose is gone" in changed.check()[0]
    changed.write()
    problems = changed.check()
    assert len(problems) == len(expected) and all(
        text in problem for text, problem in zip(expected, problems, strict=True)
    )


def test_a_name_that_was_never_released_may_be_removed(tmp_path: Path) -> None:
    changelog = "## 0.1.0, unreleased\n"
    library(tmp_path, ["keep", "lose"], changelog=changelog).write()
    changed = library(tmp_path, ["keep"], changelog=changelog)
    changed.write()
    assert changed.check() == []
    assert [name for *_, name in changed.record()] == ["hybridkv.thing.keep"]


@pytest.mark.parametrize(("requirement", "is_wrong"), [(">=0.1,<0.2", True), (">=0.2,<0.3", False), ("", True)])
def test_a_range_that_excludes_the_current_version_is_found(tmp_path: Path, requirement: str, is_wrong: bool) -> None:
    thing = library(tmp_path / "thing", [], version="0.2.0")
    user = library(tmp_path / "user", [])
    (user.folder / "pyproject.toml").write_text(
        f'[project]\nname = "hybridkv-user"\nversion = "0.1.0"\ndependencies = ["hybridkv-thing{requirement}"]\n'
    )
    assert bool(range_problems([thing, user])) == is_wrong
