"""The imports of the parent of `forked` processes: vLLM, but nothing of hybridkv, which each process imports itself.

A fork keeps only one thread, so the imports must not start any.
"""

import gc
import importlib
import os
from typing import Final

_MODULES: Final = (
    "harness",  # first, because it sets the number of torch's threads
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.gpt_oss",
    "vllm.model_executor.models.qwen3_next",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)

# Importing vLLM creates a million permanent objects; the garbage collector would scan them repeatedly.
gc.disable()
for name in _MODULES:
    importlib.import_module(name)
gc.freeze()
gc.enable()

if others := len(os.listdir("/proc/self/task")) - 1:
    raise RuntimeError(f"importing vLLM started {others} threads, which a fork would not have")
