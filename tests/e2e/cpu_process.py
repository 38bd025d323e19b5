"""Prints as JSON which CPU features an engine's worker process, started as vLLM starts it, may use.

oneDNN itself prints the instruction sets that it compiles for, in the output of this process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import harness
from harness import make_prompt, running_engine


def facts(worker: Any) -> dict[str, Any]:
    """Runs in the worker."""
    import torch

    import hybridkv.native

    probes = ("avx512", "avx512_bf16", "vnni", "amx_tile", "amx_fp16")
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {Path(line.split()[-1]).name for line in maps if "/vllm/" in line}
    return {
        "process": os.getpid(),
        "aten": torch.backends.cpu.get_cpu_capability(),
        "probes": {name: bool(getattr(torch.cpu, f"_is_{name}_supported")()) for name in probes},
        "libraries": sorted(name for name in mapped if name.startswith("_C")),
        "ours": hybridkv.native.levels()[-1],
        "threads": torch.get_num_threads(),
    }


def main(directory: str) -> None:
    os.environ["ONEDNN_VERBOSE"] = "1"
    config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": [{"type": "ram", "capacity": "64MiB"}]},
    }
    with running_engine(
        "gemma3", Path(directory), kv_transfer_config=config, distributed_executor_backend="mp"
    ) as engine:
        engine.generate([make_prompt(100, seed=0)])
        [found] = engine.core.model_executor.collective_rpc(facts)
        assert found["process"] != os.getpid()
    print(json.dumps(found))


if __name__ == "__main__":
    main(str(harness.scratch_directory(Path(sys.argv[1]))))
