"""Each library's wheel installs alone, imports neither torch nor vLLM, and runs the example of its README.

Alone means: with only the wheels that it requires, directly or indirectly. It requires no library of this project that
its sources do not import.
"""

from __future__ import annotations

import ast
import email
import functools
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import wheels

LIBRARIES = ["hashing", "canonical", "planner", "metrics", "lmcache", "tiers", "transfer", "connectors", "cli"]
NEEDS_ENGINE = {"canonical", "connectors"}
"""Libraries with a README that shows an engine's tensors or configuration. Their imports do not need the engine."""

LATER_PYTHONS = "hybridkv-native, compiled for Python 3.12 and later"
"""The name in CONTENTS.txt of the wheel that some machines cannot build."""

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


def wheelhouse() -> Path:
    return Path(os.environ["HYBRIDKV_WHEELHOUSE"]).resolve()


def wheel_of(distribution: str) -> Path:
    """The distribution's wheel for this Python. hybridkv-native has another wheel for later versions."""
    found = wheelhouse().glob(f"{distribution.replace('-', '_')}-*.whl")
    (wheel,) = (each for each in found if "-abi3-" not in each.name)
    return wheel


@functools.cache
def required(distribution: str) -> set[str]:
    """Distributions of this project that a wheel requires, without those of its extras."""
    with zipfile.ZipFile(wheel_of(distribution)) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(path))
    requirements = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in requirements}
    return {name for name in names if name.startswith("hybridkv-")}


@functools.cache
def imported(distribution: str) -> set[str]:
    """Distributions of this project that the sources in a wheel import, except itself."""
    modules: set[str] = set()
    with zipfile.ZipFile(wheel_of(distribution)) as wheel:
        for path in (name for name in wheel.namelist() if name.endswith(".py")):
            for node in ast.walk(ast.parse(wheel.read(path))):
                if isinstance(node, ast.Import):
                    modules.update(alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module == "hybridkv" and not node.level:
                    modules.update(f"hybridkv.{alias.name}" for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules.add(node.module)
    ours = {"-".join(module.split(".")[:2]) for module in modules if module.startswith("hybridkv.")}
    return ours - {distribution}


def closure(distribution: str, named: Callable[[str], set[str]]) -> set[str]:
    """A distribution and all that it names, directly or indirectly."""
    found: set[str] = set()
    new = {distribution}
    while new:
        found |= new
        new = {name for each in new for name in named(each)} - found
    return found


MakeEnvironment = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> MakeEnvironment:
    return functools.cache(lambda library, beside: installed(library, tmp_path_factory.mktemp(library), beside))


def installed(library: str, directory: Path, beside: str) -> Path:
    """An environment with one library, installed from only the wheels that it requires."""
    offered = directory / "wheelhouse"
    offered.mkdir()
    for distribution in closure(f"hybridkv-{library}", required):
        wheel = wheel_of(distribution)
        (offered / wheel.name).symlink_to(wheel)
    return wheels.install(
        offered, directory / "environment", f"hybridkv-{library}", beside=wheels.packages_beside(beside)
    )


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
def test_a_library_requires_exactly_the_libraries_that_its_sources_import(library: str) -> None:
    distribution = f"hybridkv-{library}"
    assert required(distribution) == imported(distribution)
    assert closure(distribution, required) == closure(distribution, imported)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_installs_alone_and_imports_neither_torch_nor_vllm(
    library: str, environment: MakeEnvironment
) -> None:
    run(environment(library, "msgspec"), IMPORT.format(library=library))


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_example_of_a_librarys_readme_runs(library: str, environment: MakeEnvironment) -> None:
    beside = "torch" if library in NEEDS_ENGINE else "msgspec"
    run(environment(library, beside), EXAMPLE.format(library=library))


def contents() -> tuple[set[str], dict[str, str]]:
    """The files that CONTENTS.txt lists, and the reason for each omitted item."""
    has, left_out = (wheelhouse() / "CONTENTS.txt").read_text().removeprefix("Has:\n").split("\nLeft out:\n")
    reasons = dict(line.strip().split(": ", 1) for line in left_out.splitlines())
    return {line.strip() for line in has.splitlines()}, reasons


def download(python: str, directory: Path, *distributions: str) -> subprocess.CompletedProcess[str]:
    """Lets pip choose the wheels of distributions for a version of Python, without their requirements."""
    pip = [sys._base_executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]
    options = ["--no-index", "--no-deps", "--only-binary=:all:", f"--find-links={wheelhouse()}"]
    return subprocess.run(
        [*pip, "download", *options, f"--python-version={python}", f"--dest={directory}", *distributions],
        capture_output=True,
        check=False,
        text=True,
        env=wheels.outside_environment(),
    )


def test_the_contents_name_each_file_and_give_a_reason_for_each_omission() -> None:
    has, left_out = contents()
    assert has == {file.name for file in wheelhouse().iterdir()} - {"CONTENTS.txt"}
    assert {"Python 3.10", "hybridkv-cuda", "machines other than x86-64"} <= set(left_out)
    is_complete = any("-abi3-" in name for name in has)
    assert is_complete != (LATER_PYTHONS in left_out)
    assert all(left_out.values())


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_each_supported_python_finds_a_wheel_of_each_distribution(python: str, tmp_path: Path) -> None:
    has, left_out = contents()
    names = {name.split("-")[0].replace("_", "-") for name in has}
    if python != "3.11" and LATER_PYTHONS in left_out:
        names.discard("hybridkv-native")
    ran = download(python, tmp_path, *sorted(names))
    assert ran.returncode == 0, ran.stderr
    assert len(list(tmp_path.glob("*.whl"))) == len(names)
    if python != "3.11" and LATER_PYTHONS in left_out:
        pytest.skip(left_out[LATER_PYTHONS])


def test_python_3_10_is_refused_with_the_version_that_is_required(tmp_path: Path) -> None:
    ran = download("3.10", tmp_path, "hybridkv-vllm")
    assert ran.returncode
    assert "not in '>=3.11'" in ran.stderr


def test_the_wheelhouse_has_the_sources_of_the_compiled_code() -> None:
    assert len(list(wheelhouse().glob("hybridkv_native-*.tar.gz"))) == 1
