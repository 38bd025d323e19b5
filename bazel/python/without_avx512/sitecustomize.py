"""Makes an x86-64 machine one that has AVX2 and nothing wider, for every interpreter that finds this on its path.

Libraries that choose their instructions themselves are told by the environment. vLLM asks torch: which of its own
libraries to load, which attention kernels to run, how to lay states out in memory; so torch's answer is narrowed. What
numpy and the C library run stays as it is: their results do not depend on it.
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
    # For who starts an interpreter without this one's PYTHONPATH.
    "HYBRIDKV_NARROW_SITE": os.path.dirname(os.path.abspath(__file__)),
}
MODULE = "torch.cpu"
WIDER = ("avx512", "avx10", "amx", "avx_vnni", "avx_ne_convert")


class _Loader(importlib.abc.Loader):
    """Loads the module as its own loader does, then takes the wider instructions out of its answer."""

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
