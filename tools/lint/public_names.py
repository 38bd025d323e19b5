"""Compares each library's version and public names with its CHANGELOG.md and its public_names.txt.

    python tools/lint/public_names.py            # prints the problems
    python tools/lint/public_names.py --write    # records added and removed names

Public names are the names in `__all__` of a package; the commands and entry points in pyproject.toml, and the
subcommands of commands; the modules of a library with neither `__all__` nor a command. A line of public_names.txt has
the version that added a name, and after `to` the version that removed it. A name of a released version (the heading in
the CHANGELOG does not say "unreleased") is removed only by a version outside of the ranges that other libraries
require, and with an entry of the CHANGELOG that names it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = "public_names.txt"
_HOW = "python tools/lint/public_names.py --write"


@dataclass(frozen=True, slots=True)
class Section:
    """One version's entry of a changelog."""

    version: str
    is_released: bool
    text: str

    @property
    def compatible(self) -> tuple[int, ...]:
        """First two numbers of the version, (0, 1) for the range `>=0.1,<0.2`. No name is removed within a range."""
        return tuple(map(int, self.version.split(".")))[:2]


@dataclass(slots=True)
class Library:
    """A distribution in the tree: its pyproject.toml, its changelog and its record of public names."""

    folder: Path
    changelog: Path

    @property
    def project(self) -> dict[str, Any]:
        loaded: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return loaded

    @property
    def sections(self) -> list[Section]:
        """The entries of the changelog, newest first."""
        parts = re.split(r"^## (\d\S*)(.*)\n", self.changelog.read_text(), flags=re.M)[1:]
        entries = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        return [Section(version.rstrip(","), "unreleased" not in rest, text) for version, rest, text in entries]

    def names(self) -> set[str]:
        """The public names in the sources."""
        source, project = self.folder / "src", self.project
        found: set[str] = set()
        for path in sorted(source.glob("hybridkv/**/__init__.py")):
            package = ".".join(path.parent.relative_to(source).parts)
            exported = _exported(path)
            found |= {f"{package}.{name}" for name in exported}
            if not exported and not project.get("scripts") and len(path.relative_to(source).parts) == 3:
                modules = [
                    *path.parent.glob("[!_]*.py"),
                    *(each.parent for each in path.parent.glob("[!_]*/__init__.py")),
                ]
                found |= {f"{package}.{each.stem}" for each in modules}
        if project.get("scripts"):
            found |= {f"subcommand:{name}" for path in source.glob("**/*.py") for name in _subcommands(path)}
        groups = {"script": project.get("scripts", {})} | project.get("entry-points", {})
        return found | {f"{group}:{name}" for group, entries in groups.items() for name in entries}

    def record(self) -> list[tuple[str, str, str]]:
        """The recorded names as (version that added it, version that removed it or "", name)."""
        path = self.folder / RECORD
        fields = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(each[0], each[2] if len(each) == 4 else "", each[-1]) for each in fields]

    def check(self) -> list[str]:
        """The problems, one line each."""
        version, sections = self.project["version"], self.sections
        wrong = []
        if sections[0].version != version:
            wrong.append(f"version {version} in pyproject.toml, {sections[0].version} on top of the CHANGELOG")
        recorded = {name for _, until, name in self.record() if not until}
        names = self.names()
        wrong += [f"{name} is new: {_HOW}" for name in sorted(names - recorded)]
        hint = f"a new version with an entry in the CHANGELOG, then {_HOW}" if sections[0].is_released else _HOW
        wrong += [f"{name} is gone: {hint}" for name in sorted(recorded - names)]
        for _, until, name in self.record():
            if until and name not in recorded:
                wrong += self._removal_problems(name, until)
        return [f"{self.folder}: {problem}" for problem in wrong]

    def _removal_problems(self, name: str, until: str) -> list[str]:
        """Reasons why a version may not remove a released name."""
        sections = self.sections
        position = next((index for index, each in enumerate(sections) if each.version == until), None)
        if position is None:
            return [f"{name} was removed in {until}, which the CHANGELOG does not have"]
        wrong = []
        older = next((each for each in sections[position + 1 :] if each.is_released), None)
        if older and older.compatible == sections[position].compatible:
            wrong.append(f"{name} was released in {older.version}: {until} cannot remove it, raise the second number")
        if not re.search(rf"\b{re.escape(re.split('[.:]', name)[-1])}\b", sections[position].text):
            wrong.append(f"{name} was removed in {until}, whose entry in the CHANGELOG does not have the name")
        return wrong

    def write(self) -> None:
        """Records the names of the sources. Released names that were removed stay, with the version that removed
        them.

        A version that is released itself removes nothing: a name that it lacks stays recorded as present.
        """
        version, names = self.project["version"], self.names()
        released = {each.version for each in self.sections if each.is_released}
        old = self.record()
        current = {name: since for since, until, name in old if not until}
        lines = [(since, until, name) for since, until, name in old if until]
        lines += [(current.get(name, version), "", name) for name in names]
        gone = [(since, name) for name, since in current.items() if name not in names and since in released]
        until = "" if version in released else version
        lines += [(since, until, name) for since, name in gone]
        text = [f"{since} to {until} {name}" if until else f"{since} {name}" for since, until, name in lines]
        text.sort(key=lambda line: line.split()[::-1])
        (self.folder / RECORD).write_text("".join(f"{line}\n" for line in text))


def _exported(path: Path) -> list[str]:
    """Names in `__all__` of a module; none if the module has no `__all__`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _subcommands(path: Path) -> list[str]:
    """The functions of a module that click makes subcommands of a group."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    decorated = [(each.name, decorator) for each in functions for decorator in each.decorator_list]
    return [name for name, decorator in decorated if re.match(r"main\.command\b", ast.unparse(decorator))]


def range_problems(libraries: list[Library]) -> list[str]:
    """Requirements between our distributions that do not admit the version in the tree."""
    versions = {each.project["name"]: each.project["version"] for each in libraries}
    wrong = []
    for library in libraries:
        project = library.project
        extras = project.get("optional-dependencies", {}).values()
        for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
            found = re.fullmatch(r"(hybridkv-\w+)(?:\[\w+\])?>=([\d.]+),<([\d.]+)", line)
            if not line.startswith("hybridkv-"):
                continue
            if found is None or found[1] not in versions:
                wrong.append(f"{library.folder}: expected a range such as hybridkv-tiers>=0.1,<0.2, got {line}")
                continue
            low, version, high = (tuple(map(int, each.split("."))) for each in (found[2], versions[found[1]], found[3]))
            if not low <= version < high:
                wrong.append(f"{library.folder}: {line} does not admit {versions[found[1]]}, the version in the tree")
    return wrong


def libraries_of(root: Path) -> list[Library]:
    """All distributions; hybridkv-vllm has the changelog of the whole product."""
    folders = [*sorted(root.glob("libs/*/pyproject.toml")), root / "csrc/bindings/pyproject.toml"]
    found = [Library(each.parent, each.parent / "CHANGELOG.md") for each in folders]
    found.append(Library(root / "csrc/cuda", root / "csrc/cuda/CHANGELOG.md"))
    return [*found, Library(root / "plugins/vllm", root / "CHANGELOG.md")]


def main() -> int:
    libraries = libraries_of(Path())
    if "--write" in sys.argv:
        for library in libraries:
            library.write()
    wrong = [line for library in libraries for line in library.check()] + range_problems(libraries)
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
