"""What the parent of `forked` processes imports: vLLM, and nothing of hybridkv, which each process imports by itself.

A fork takes along one thread alone, so that an import must have started none.
"""

import gc
import importlib
import os
from typing import Final

_MODULES: Final = (
    "harness",  # first, because it decides on how many threads torch runs
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.gpt_oss",
    "vllm.model_executor.models.qwen3_next",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)

# Importing vLLM makes a million objects that stay: the collector would look at them again and again.
gc.disable()
for name in _MODULES:
    importlib.import_module(name)
gc.freeze()
gc.enable()

if others := len(os.listdir("/proc/self/task")) - 1:
    raise RuntimeError(f"importing vLLM started {others} threads, which a fork would not have")
