"""An engine with a connector to a server of LMCache, or with none: a process that `lmcache_ttft.py` tells what to do.

It says where the time to a first token went, as vLLM's scheduler sees it, which knows no connector: until a request
waited for what another process holds (the lookup), until that had come (the retrieve), and what was computed then.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from harness import running_engine
from told_process import PAUSE_S, Serving, take_answers

LOADING = "WAITING_FOR_REMOTE_KVS"


class LMCacheServing(Serving):
    """What it can be told."""

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds from a request to its first token, and what became of it."""
        engine = self.engine
        began_s = time.perf_counter()
        name = engine.add(prompt, max_tokens=1)
        loading_s = computing_s = None
        while True:
            step_s = time.perf_counter()
            finished = engine.step()
            if engine.has_computed and computing_s is None:
                computing_s = step_s
            if finished:
                break
            if loading_s is None and engine.status(name) == LOADING:
                loading_s = step_s  # a connector may load within the step that decides to
            if not engine.has_computed:
                time.sleep(PAUSE_S)
        ended_s = time.perf_counter()
        result = finished[0]
        assert result.request_id == name and computing_s is not None
        token = result.token_ids[0]
        return {
            "seconds": ended_s - began_s,
            "lookup": (loading_s or computing_s) - began_s,
            "retrieve": computing_s - (loading_s or computing_s),
            "compute": ended_s - computing_s,
            "computed": sum(step.num_tokens for step in result.steps),
            "token": token,
            "logprob": result.logprobs[0][token],
        }

    def forget(self) -> None:
        """Drop the engine's own prefix cache, as soon as nobody reads or writes it."""
        self.engine.reset_prefix_cache()

    def idle(self) -> None:
        self.engine.drain()


def let_vars_work() -> None:
    """LMCache imports numba, whose llvmlite takes `__dict__` for a function of LLVM's. vLLM on a CPU asks every object
    in every module for it, and does not start."""
    from llvmlite.binding import ffi

    function_of = ffi._lib_wrapper.__getattr__

    def no_dunder(library: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return function_of(library, name)

    ffi._lib_wrapper.__getattr__ = no_dunder


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("kind", "transfer", "arguments"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    chosen = parser.parse_args()
    answers = take_answers()
    transfer = json.loads(chosen.transfer)
    connector = transfer and transfer["kv_connector"]
    if connector == "LMCacheMPConnector":
        let_vars_work()
    elif connector is not None:
        from hybridkv.connectors.vllm import register

        register()
    arguments = json.loads(chosen.arguments)
    with running_engine(chosen.kind, chosen.directory, kv_transfer_config=transfer, **arguments) as engine:
        LMCacheServing(engine).run(answers)


if __name__ == "__main__":
    main()
