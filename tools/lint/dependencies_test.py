"""Checks that the distribution of each library in libs/ declares the packages that its sources import.

Bazel cannot check it: all packages of a lock share a directory, so a dependency on any of them makes all of them
importable. A wheel with a missing dependency fails only when a user imports it.
"""

import ast
import pathlib
import re
import sys
import tomllib
from typing import Any

# Packages that the engine's environment has, or that the operator installs. These distributions do not declare them.
ENGINE = {"cli": {"torch", "vllm"}, "connectors": {"huggingface_hub", "torch", "vllm"}}

# Distributions with another name than their package.
DISTRIBUTIONS = {"zmq": "pyzmq"}


def _imported(path: pathlib.Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def _distribution(module: str) -> str:
    parts = module.split(".")
    return "-".join(parts[:2]) if parts[0] == "hybridkv" else DISTRIBUTIONS.get(parts[0], parts[0])


def _declared(project: dict[str, Any]) -> set[str]:
    extras = project.get("optional-dependencies", {})
    requirements = [*project["dependencies"], *(r for extra in extras.values() for r in extra)]
    return {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in requirements}


def main() -> int:
    wrong = []
    libraries = sorted(pathlib.Path("libs").glob("*/pyproject.toml"))
    for file in libraries:
        library = file.parent
        project = tomllib.loads(file.read_text())["project"]
        given = ENGINE.get(library.name, set())
        known = _declared(project) | given | {project["name"]} | sys.stdlib_module_names
        wrong += [
            f"{path}: imports {module}, which {file} does not declare"
            for path in sorted(library.glob("src/**/*.py"))
            for module in sorted(_imported(path))
            if _distribution(module) not in known
        ]
    if not libraries:
        wrong.append("no libs/*/pyproject.toml here")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
