"""With `--config=avx2` an engine runs as on a machine without AVX-512, including all libraries of its worker's
process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cpu_process
import pytest
from harness import scratch_directory

NARROWS = "bazel/python/without_avx512"
LEVEL = "HYBRIDKV_CPU_LEVEL"


def run(directory: Path, first_on_path: list[str], environment: dict[str, str]) -> tuple[dict[str, Any], set[str]]:
    """The facts printed by the worker, and the kernels that oneDNN chose for its matrices."""
    path = [*first_on_path, *(entry for entry in sys.path if entry and not entry.endswith(NARROWS))]
    program = [sys.executable, cpu_process.__file__, str(directory)]
    environment = environment | {"PYTHONPATH": os.pathsep.join(path)}
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    matmuls = [line for line in lines if line.startswith("onednn_verbose") and ",exec,cpu,matmul," in line]
    kernels = {line.split(",")[6] for line in matmuls}
    facts: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return facts, kernels


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scratch_directory(tmp_path_factory.mktemp("cpu"))


def test_a_narrowed_engine_uses_nothing_wider_than_avx2(directory: Path) -> None:
    facts, kernels = run(directory, [str(Path(NARROWS).absolute())], dict(os.environ))
    assert not any(facts["probes"].values())
    assert (facts["aten"], facts["libraries"], facts["ours"]) == ("AVX2", ["_C_AVX2.abi3.so"], "avx2")
    assert kernels and not any("avx512" in kernel or "amx" in kernel for kernel in kernels)


def test_this_run_uses_the_cpu_level_of_its_configuration() -> None:
    import torch

    is_wide = torch.cpu._is_avx512_supported()
    assert not (is_wide and os.environ.get(LEVEL) == "avx2")


def test_an_unrestricted_engine_uses_all_features_of_the_machine(directory: Path) -> None:
    """Control."""
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no AVX-512, so there is nothing to narrow")
    ours = ("HYBRIDKV_CPU_LEVEL", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    facts, kernels = run(directory, [], {name: value for name, value in os.environ.items() if name not in ours})
    assert (facts["probes"]["avx512"], facts["aten"], facts["ours"]) == (True, "AVX512", "avx512")
    assert any("avx512" in kernel for kernel in kernels)
