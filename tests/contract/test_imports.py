"""Pins the layers at run time: what decides, names and stores loads neither torch nor vLLM.

A fresh interpreter for each library, since an import cannot be undone. The engine is importable
here on purpose: an import that is merely impossible would prove nothing.
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


def test_the_names_of_views_alone_load_torch_with_canonical() -> None:
    assert _loads("import hybridkv.canonical as canonical; dir(canonical); canonical.GroupPages") == set()
    assert _loads("from hybridkv.canonical import CanonicalKVCaches") == {"torch"}


def test_the_check_notices_an_engine_that_is_loaded() -> None:
    assert _loads("import torch") == {"torch"}
