"""Words that once had several meanings name one type, or none."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from pages.tree import python_files

ROOT = Path(__file__).absolute().parents[2]
MEANINGS = {
    "Move": None,
    "State": "libs/planner/src/hybridkv/planner/transfers.py",
    "Load": "libs/connectors/src/hybridkv/connectors/vllm/common/messages.py",
    "Job": "libs/transfer/src/hybridkv/transfer/jobs.py",
    "Chunk": None,
    "Place": None,
}
"""The file that defines the type of that name. None: pages use the word, and no type has it as its whole name."""


def sources() -> dict[str, str]:
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in python_files(ROOT)}


def types_named(word: str, files: Mapping[str, str]) -> list[str]:
    """The files that define a type of that name, including private ones, aliases and plurals."""
    wanted = {f"{prefix}{word}{suffix}" for prefix in ("", "_") for suffix in ("", "s")}
    found = []
    for name, text in files.items():
        if not re.search(rf"\b_?{word}s?\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                names = {node.name}
            elif isinstance(node, ast.Assign):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = {node.target.id}
            else:
                continue
            found += [name] * len(names & wanted)
    return found


@pytest.mark.parametrize("word", MEANINGS)
def test_a_word_names_one_type_or_none(word: str) -> None:
    meaning = MEANINGS[word]
    assert types_named(word, sources()) == ([] if meaning is None else [meaning])


@pytest.mark.parametrize("word", MEANINGS)
def test_the_glossary_defines_the_word(word: str) -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert len(re.findall(rf"^\| (?:\w+, )*{word.lower()}(?:, \w+)* \|", glossary, re.MULTILINE)) == 1


def test_the_stack_uses_the_word_lease_and_not_claim() -> None:
    folder = "libs/tiers/src/hybridkv/tiers/"
    texts = {name: text for name, text in sources().items() if name.startswith(folder)}
    assert f"{folder}stack/leases.py" in texts
    assert [name for name, text in texts.items() if re.search("claim", text, re.IGNORECASE)] == []


@pytest.mark.parametrize(
    "text",
    ["class Job:\n    ...\n", "def f():\n    class _Job: ...\n", "Jobs = dict[int, str]\n", "_Job: TypeAlias = int\n"],
)
def test_a_second_type_of_the_same_name_is_found(text: str) -> None:
    files = {"one.py": "class Job: ...\n", "none.py": "# Job\nJobId = int\n", "two.py": text}
    assert types_named("Job", files) == ["one.py", "two.py"]
