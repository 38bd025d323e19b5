"""Each library's wheel installs alone, imports neither torch nor vLLM, and does what its README shows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import wheels

LIBRARIES = ["hashing", "canonical", "planner", "metrics", "tiers", "transfer", "connectors"]
NEEDS_ENGINE = {"canonical", "connectors"}
"""Whose README shows an engine's tensors or configuration; their imports need nothing of it."""

IMPORT = """
import importlib, sys
module = importlib.import_module("hybridkv.{library}")
assert sys.prefix in module.__file__, module.__file__
heavy = {{"torch", "vllm"}} & set(sys.modules)
assert not heavy, heavy
"""
EXAMPLE = """
import importlib.metadata, re
text = importlib.metadata.metadata("hybridkv-{library}").get_payload()
blocks = re.findall(r"^```python\\n(.*?)^```", text, re.S | re.M)
assert blocks, "the README shows no example"
exec(compile("\\n".join(blocks), "README.md", "exec"), {{"__name__": "__main__"}})
"""


def environment(library: str, directory: Path, beside: str) -> Path:
    wheelhouse = Path(os.environ["HYBRIDKV_WHEELHOUSE"]).resolve()
    return wheels.install(wheelhouse, directory, f"hybridkv-{library}", beside=wheels.packages_beside(beside))


def run(python: Path, program: str) -> None:
    ran = subprocess.run(
        [python, "-c", program],
        capture_output=True,
        check=False,
        text=True,
        cwd=python.parent,
        env=wheels.outside_environment(),
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_installs_alone_and_imports_neither_torch_nor_vllm(library: str, tmp_path: Path) -> None:
    run(environment(library, tmp_path, "msgspec"), IMPORT.format(library=library))


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_example_of_a_librarys_readme_runs(library: str, tmp_path: Path) -> None:
    beside = "torch" if library in NEEDS_ENGINE else "msgspec"
    run(environment(library, tmp_path, beside), EXAMPLE.format(library=library))
