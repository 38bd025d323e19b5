"""Process with an engine for `lmcache_ttft.py`, with a connector to a server of LMCache or with none.

Divides the time to a first token by the states of vLLM's scheduler, independently of the connector: until the request
waits for remote KV data (the lookup), until these data have arrived (the retrieve), and the computation after that.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from driven_process import PAUSE_S, Serving, take_answers
from harness import running_engine

LOADING = "WAITING_FOR_REMOTE_KVS"


class LMCacheServing(Serving):
    """Commands of the process."""

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds from a request to its first token, with their parts, and the token."""
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
                loading_s = step_s  # a connector may load in the same step
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
        """Drops the engine's own prefix cache, after pending reads and writes."""
        self.engine.reset_prefix_cache()

    def idle(self) -> None:
        self.engine.drain()


def patch_llvmlite() -> None:
    """Makes attributes with two underscores fail in llvmlite, which LMCache imports through numba. llvmlite
    handles `__dict__` as a function of LLVM. vLLM on a CPU reads `__dict__` of every object in every module, so it
    would not start without this patch."""
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
        patch_llvmlite()
    elif connector is not None:
        from hybridkv.connectors.vllm import register

        register()
    arguments = json.loads(chosen.arguments)
    with running_engine(chosen.kind, chosen.directory, kv_transfer_config=transfer, **arguments) as engine:
        LMCacheServing(engine).run(answers)


if __name__ == "__main__":
    main()
