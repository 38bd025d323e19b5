"""Limits an x86-64 machine to AVX2, for every interpreter that has this file on its path.

Environment variables limit the libraries that choose their instructions themselves. vLLM uses torch's list of CPU
features to choose its libraries, attention kernels and the memory layout of states, so that list is shortened. numpy
and the C library are not limited: their results do not depend on the instructions.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType

VARIABLES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "HYBRIDKV_CPU_LEVEL": "avx2",
    # For tests that start an interpreter with another PYTHONPATH.
    "HYBRIDKV_NARROW_SITE": os.path.dirname(os.path.abspath(__file__)),
}
MODULE = "torch.cpu"
WIDER = ("avx512", "avx10", "amx", "avx_vnni", "avx_ne_convert")


class _Loader(importlib.abc.Loader):
    """Loads the module with its own loader, then removes wider instructions from its list of features."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        narrow = {name: False if name.startswith(WIDER) else has for name, has in module.get_capabilities().items()}
        answer = MappingProxyType(narrow)

        def get_capabilities() -> Mapping[str, object]:
            return answer

        module.get_capabilities = get_capabilities  # type: ignore[attr-defined]
        module._init_amx = lambda: False  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


os.environ |= VARIABLES
if MODULE in sys.modules:
    raise ImportError("torch was imported before its answers could be narrowed")
sys.meta_path.insert(0, _Finder())
