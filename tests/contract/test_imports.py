"""Pins the layers at run time: libraries below the connectors load neither torch nor vLLM.

Each library gets a fresh interpreter, since an import cannot be undone. The engine is importable here on purpose: an
import that fails would prove nothing.
"""

import subprocess
import sys

import pytest

ENGINE = ("torch", "vllm")


def _loads(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*(m for m in {ENGINE!r} if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize("library", ["canonical", "hashing", "lmcache", "metrics", "peers", "planner", "tiers"])
def test_importing_a_library_below_the_connectors_loads_no_engine(library: str) -> None:
    assert _loads(f"import hybridkv.{library}") == set()


def test_canonical_loads_torch_only_for_the_names_of_views() -> None:
    assert _loads("import hybridkv.canonical as canonical; dir(canonical); canonical.GroupPages") == set()
    assert _loads("from hybridkv.canonical import CanonicalKVCaches") == {"torch"}


def test_the_check_detects_a_loaded_engine() -> None:
    assert _loads("import torch") == {"torch"}
