"""Compiles the extension, unless Bazel has put it into the package, and tags the wheel with its platform.

A source distribution has the C++ files in `csrc`. Compiling them needs g++ 12 or another C++20 compiler, and nanobind.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 - a build waits for all of its threads
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GLIBC = "2_34"
"""The oldest glibc with every symbol of the extension. A test checks it with auditwheel."""
OLDEST_OF_ABI3 = ("cp312", "abi3")
"""nanobind's stable ABI needs functions of Python 3.12."""
COMPILER_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-DNDEBUG", "-w")


class NativeTag(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data["pure_python"] = False
        extensions = sorted(Path(self.root, "src/hybridkv/native").glob("*.so"))
        if not extensions and Path(self.root, "csrc").is_dir():
            compile_extension(Path(self.root))
            build_data["infer_tag"] = True
            return
        if len(extensions) != 1:
            raise FileNotFoundError(
                f"src/hybridkv/native: expected one extension, got {[file.name for file in extensions]}; "
                "hint: build the wheel with Bazel, which compiles it"
            )
        # _cpu.cpython-311-x86_64-linux-gnu.so, or _cpu.abi3.so
        _, kind, *_ = extensions[0].name.split(".")
        python, abi = OLDEST_OF_ABI3 if kind == "abi3" else ("cp" + kind.split("-")[1],) * 2
        build_data["tag"] = f"{python}-{abi}-manylinux_{GLIBC}_{platform.machine()}"


def compile_extension(root: Path) -> None:
    """Compiles `csrc` for this Python and this machine.

    Raises:
        RuntimeError: no compiler was found, or it failed; its output is in the message.
    """
    import nanobind

    binding = Path(nanobind.__file__).parent
    includes = [
        root,
        root / "csrc/include",
        binding / "include",
        binding / "ext/robin_map/include",
        sysconfig.get_path("include"),
    ]
    flags = [*COMPILER_FLAGS, *(f"-I{folder}" for folder in includes)]
    sources = [*sorted(root.glob("csrc/*/*.cc")), binding / "src/nb_combined.cpp"]
    extension = root / "src/hybridkv/native" / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [Path(scratch, f"{number}.o") for number in range(len(sources))]
        commands = [[*flags, "-c", str(source), "-o", str(each)] for source, each in zip(sources, objects, strict=True)]
        list(pool.map(run_compiler, commands))
        exports = f"-Wl,--version-script={root / 'csrc/bindings/exports.lds'}"
        run_compiler(["-shared", *map(str, objects), exports, "-Wl,--as-needed", "-lpthread", "-o", str(extension)])


def run_compiler(arguments: list[str]) -> None:
    compiler = os.environ.get("CXX", "g++")
    try:
        ran = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(
            f"hybridkv-native has no wheel for this Python and machine, and cannot be compiled: {compiler}: {error}; "
            "hint: install g++ 12 or later, or name a compiler of C++20 in CXX"
        ) from error
    if ran.returncode:
        raise RuntimeError(f"hybridkv-native could not be compiled: {compiler} {' '.join(arguments)}\n{ran.stderr}")
