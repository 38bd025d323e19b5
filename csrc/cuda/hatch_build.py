"""Tags the wheel with its platform and no Python ABI, because ctypes loads the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PlatformTag(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = Path(self.root, "src/hybridkv/cuda_kernels/libhybridkv_cuda.so")
        if version == "standard" and not library.exists():
            raise FileNotFoundError(f"{library}: build the wheel with Bazel, which compiles it")
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
