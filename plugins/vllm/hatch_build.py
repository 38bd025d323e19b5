"""Puts the compiled part into the wheel, and tags the wheel for what that part runs on.

Bazel compiles it and lays it beside this file. A wheel that is built without it is for every platform and Python; the
libraries then use their references.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GLIBC = "2_34"
"""The oldest that has every symbol of the extension; a test asks auditwheel."""
OLDEST_OF_ABI3 = ("cp312", "abi3")
"""nanobind's stable ABI needs what Python 3.12 brought."""


class NativeTag(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        native = Path(self.root, "src/hybridkv/native")
        extensions = sorted(native.glob("*.so"))
        if not extensions:
            return
        [extension] = extensions
        # _cpu.cpython-311-x86_64-linux-gnu.so, or _cpu.abi3.so
        _, kind, *_ = extension.name.split(".")
        python, abi = OLDEST_OF_ABI3 if kind == "abi3" else ("cp" + kind.split("-")[1],) * 2
        build_data["pure_python"] = False
        build_data["tag"] = f"{python}-{abi}-manylinux_{GLIBC}_{platform.machine()}"
        for file in native.iterdir():
            build_data["force_include"][str(file)] = f"hybridkv/native/{file.name}"
