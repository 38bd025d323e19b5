"""Fresh virtual environments with hybridkv installed from its wheels, as a user installs it.

Their Python sees none of this tree's sources and nothing that the test imports: only what pip installed and the
packages that are named.
"""

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path


def outside_environment() -> dict[str, str]:
    """This process's environment, without what would let a child import what this process imports."""
    ours = ("PYTHON", "RUNFILES_", "JAVA_RUNFILES", "PIP_", "VLLM_ENABLE_V1_MULTIPROCESSING")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    if narrow := os.environ.get("HYBRIDKV_NARROW_SITE"):  # --config=avx2: the machine stays as narrow as it was
        environment["PYTHONPATH"] = narrow
    return environment


def packages_beside(module: str) -> Path:
    """The directory of packages that a module of this process comes from."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    return Path(spec.origin).resolve().parents[1]


def install(wheelhouse: Path, directory: Path, distribution: str, beside: Path) -> Path:
    """Makes a virtual environment, lets pip install a distribution there, and returns its Python.

    pip takes wheels from `wheelhouse` only and checks every requirement, which `beside`, packages that are there
    already, must meet.
    """
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    (site_packages,) = directory.glob("lib/python*/site-packages")
    (site_packages / "beside.pth").write_text(f"{beside}\n")
    # The interpreter that Bazel found has no pip; the one it was made from has.
    pip = [sys._base_executable, "-m", "pip", "--isolated", "--no-cache-dir", "--disable-pip-version-check"]
    options = ["--no-index", f"--find-links={wheelhouse}"]
    subprocess.run(
        [*pip, f"--python={python}", "install", *options, distribution], check=True, env=outside_environment()
    )
    return python
