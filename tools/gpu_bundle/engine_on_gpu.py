"""Runs the quickstart with a vLLM engine on the GPU: warm answers must equal cold ones.

    engine_on_gpu.py MODEL COPIES    MODEL: of tiny_models; COPIES: "engine" or "native"

Attention and gated delta nets run in Triton, because the bundle has no other kernels for them. Triton uses the first
configuration of each kernel: to measure all of them takes two minutes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import quickstart
import tiny_models

ARGUMENTS = {
    "attention_backend": "TRITON_ATTN",
    "additional_config": {"gdn_prefill_backend": "triton"},
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.12,  # three engines share the GPU
    "kv_cache_memory_bytes": 2 << 30,  # otherwise an engine does not start if another one frees memory during its start
}


def take_first_configurations() -> None:
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    def with_one(self: Any, fn: Any, names: Any, configurations: Any, *rest: Any, **named: Any) -> None:
        init(self, fn, names, configurations[:1], *rest, **named)

    Autotuner.__init__ = with_one


def main(model: str, copies: str) -> None:
    take_first_configurations()
    tiny_models.ENGINE_ARGUMENTS[model] |= ARGUMENTS
    start_engine = quickstart._start_engine

    def start(path: Path, arguments: dict[str, Any], verbose: bool) -> Any:
        from hybridkv.connectors.vllm import register

        register()
        arguments["kv_transfer_config"]["kv_connector_extra_config"]["copies"] = copies
        return start_engine(path, arguments, verbose)

    quickstart._start_engine = start
    quickstart.main(["--model", model, "--verbose"])


if __name__ == "__main__":
    main(*sys.argv[1:])
