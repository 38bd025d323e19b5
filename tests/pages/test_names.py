"""Class names are unique, and replaced names are not used again."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from pages.tree import python_files

ROOT = Path(__file__).absolute().parents[2]
OLD_NAMES = {
    "Asked": "lookup tracker",
    "Cascades": "CascadeQueue",
    "Courier": "lookup client",
    "Duties": "Role",
    "Ears": "callbacks",
    "Hold": "lease",
    "Lives": "LoadTracker",
    "Librarian": "ManifestStore",
    "Member": "session",
    "Messenger": "lookup client",
    "Met": "stored prefix",
    "Placing": "PrefixChain",
    "Presence": "identity",
    "Questioner": "lookup client",
    "Questions": "lookup tracker",
    "Reading": "view, reader or read manager",
    "Recorder": "ConnectorMetrics",
    "Renewals": "LRU refresh",
    "Saves": "StoreTracker",
    "Shelf": "size class",
    "Site": "SessionSpec",
    "Station": "RankSession",
    "Steering": "PrefillStops",
    "StoredPath": "PrefixChain",
    "Stranded": "orphaned chunks",
    "Sworn": "AdapterVersion",
    "ToldHashes": "AnnouncedBlocks",
    "Traffic": "in-flight moves",
    "Ways": "tier health",
    "doomed": "deleted",
    "duties": "role",
    "find_met": "stored prefix",
    "late_keys": "timed_out_keys",
    "steering": "prefill_stops",
    "sworn": "adapter_version",
    "told_hashes": "announced_blocks",
    "wish": "add_stops",
}
"""Replaced names of classes, functions and attributes, without leading underscores, and the new name."""
OLD_MODULES = {"announcement": "builder", "answers": "decode_states", "opening": "builder", "steering": "prefill_stops"}
_OLD = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(OLD_NAMES)})(?![A-Za-z0-9_])")


@functools.cache
def product() -> dict[str, str]:
    names = [name for name in python_files(ROOT) if re.match(r"libs/\w+/src/", name)]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names}


def guides() -> dict[str, str]:
    paths = [ROOT / "README.md", *ROOT.glob("libs/*/README.md"), *(ROOT / "docs").rglob("*.md")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def repeated_classes(files: Mapping[str, str]) -> dict[str, list[str]]:
    """The files of each class name that occurs more than once. A leading underscore is ignored."""
    found = defaultdict(list)
    for file, text in files.items():
        for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
            found[name.lstrip("_")].append(file)
    return {name: where for name, where in found.items() if len(where) > 1}


def old_names_in_code(files: Mapping[str, str]) -> list[tuple[str, str]]:
    """Old names that code defines or uses, each with its file. Comments and strings are ignored."""
    found = set()
    for file, text in files.items():
        found |= {(file, stem) for stem in [PurePosixPath(file).stem] if stem in OLD_MODULES}
        if _OLD.search(text):
            found |= {(file, name) for name in _names(ast.parse(text)) if name in OLD_NAMES}
    return sorted(found)


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for attribute in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, attribute, None), str):
                yield name.rpartition(".")[2].lstrip("_")


def old_names_in_pages(pages: Mapping[str, str]) -> list[tuple[str, str]]:
    """Old names in code spans of pages, each with its page. Prose is ignored."""
    return [
        (page, name)
        for page, text in pages.items()
        for span in re.findall(r"`[^`\n]+`", text)
        for name in _OLD.findall(span)
    ]


def test_class_names_are_unique() -> None:
    files = product()
    assert len(files) > 300
    assert repeated_classes(files) == {}


def test_old_names_are_not_used() -> None:
    assert old_names_in_code(product()) == []
    assert old_names_in_pages(guides()) == []


def test_a_repeated_class_name_is_found() -> None:
    files = {
        "one.py": "class Lease: ...\n",
        "two.py": "x = 1\nclass _Lease(Base):\n    ...\n",
        "three.py": "class B: ...\n",
    }
    assert repeated_classes(files) == {"Lease": ["one.py", "two.py"]}


def test_an_old_name_is_found() -> None:
    code = {
        "a.py": "class _Station: ...\n",
        "b.py": "def begin(self): return self._steering\n",
        "c.py": "from x import Recorder as Other\n",
        "d.py": "# Station\nText = 'Saves'\nStations = 1\n",
        "opening.py": "",
    }
    assert old_names_in_code(code) == [
        ("a.py", "Station"),
        ("b.py", "steering"),
        ("c.py", "Recorder"),
        ("opening.py", "opening"),
    ]
    pages = {"one.md": "Questions about `Duties.loads`.\n", "two.md": "`Stations` of a doomed `wisher`.\n"}
    assert old_names_in_pages(pages) == [("one.md", "Duties")]
