"""Tags the wheel for what its extension runs on. Bazel compiles the extension and lays it in the package."""

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
        extensions = sorted(Path(self.root, "src/hybridkv/native").glob("*.so"))
        if len(extensions) != 1:
            raise FileNotFoundError(
                f"src/hybridkv/native: expected one extension, got {[file.name for file in extensions]}; "
                "hint: build the wheel with Bazel, which compiles it"
            )
        # _cpu.cpython-311-x86_64-linux-gnu.so, or _cpu.abi3.so
        _, kind, *_ = extensions[0].name.split(".")
        python, abi = OLDEST_OF_ABI3 if kind == "abi3" else ("cp" + kind.split("-")[1],) * 2
        build_data["pure_python"] = False
        build_data["tag"] = f"{python}-{abi}-manylinux_{GLIBC}_{platform.machine()}"
