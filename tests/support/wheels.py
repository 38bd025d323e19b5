"""Fresh virtual environments with hybridkv installed from its wheels, as a user installs it.

Their Python does not see the sources of this tree or anything that the test imports: only what pip installed and the
packages named by the test.
"""

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path


def outside_environment() -> dict[str, str]:
    """This process's environment, without variables that would let a child import what this process imports."""
    ours = ("PYTHON", "RUNFILES_", "JAVA_RUNFILES", "PIP_", "VLLM_ENABLE_V1_MULTIPROCESSING")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    if narrow := os.environ.get(
        "HYBRIDKV_NARROW_SITE"
    ):  # --config=avx2: the child runs with the same narrow CPU features
        environment["PYTHONPATH"] = narrow
    return environment


def packages_beside(module: str) -> Path:
    """The directory with the packages from which a module of this process was imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    return Path(spec.origin).resolve().parents[1]


def install(wheelhouse: Path, directory: Path, distribution: str, beside: Path) -> Path:
    """Create a virtual environment, install a distribution there with pip, and return its Python.

    pip takes wheels only from `wheelhouse` and checks every requirement; the packages in `beside` must satisfy them.
    """
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    (site_packages,) = directory.glob("lib/python*/site-packages")
    (site_packages / "beside.pth").write_text(f"{beside}\n")
    # The interpreter found by Bazel has no pip; its base interpreter has.
    pip = [sys._base_executable, "-m", "pip", "--isolated", "--no-cache-dir", "--disable-pip-version-check"]
    options = ["--no-index", f"--find-links={wheelhouse}"]
    subprocess.run(
        [*pip, f"--python={python}", "install", *options, distribution], check=True, env=outside_environment()
    )
    return python
