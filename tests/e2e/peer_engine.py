"""One engine of a pair with any connector, run as a process that is controlled by lines of JSON.

It steps as vLLM's own loop does: immediately after a step that computed, and after a millisecond if a request waits for
its blocks or a reader uses them. Of the connector it reads only the counters.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from driven_process import PAUSE_S, Serving, take_answers
from harness import running_engine

from hybridkv.connectors.vllm import register
from hybridkv.connectors.vllm.common.layout import resolve_groups
from kits.peers.volume import GroupBytes, full_attention_bytes, moved_bytes

LAST_PRIORITY = 19
WORDS = {
    "vllm:hybridkv_peer_read_bytes_total": "bytes",
    "vllm:hybridkv_peer_read_descriptors_total": "descriptors",
    "vllm:hybridkv_peer_read_seconds": "seconds",
    "vllm:nixl_bytes_transferred": "bytes",
    "vllm:nixl_num_descriptors": "descriptors",
    "vllm:nixl_xfer_time_seconds": "seconds",
}
"""Metrics of reads of either connector."""


class PeerServing(Serving):
    """The commands for an engine of a pair."""

    def first_token(self, prompt: list[int], params: dict[str, Any] | None) -> dict[str, Any]:
        """Seconds from the request to its first token."""
        engine = self.engine
        began_s = time.perf_counter()
        name = engine.add(prompt, max_tokens=1, kv_transfer_params=params)
        while not (finished := engine.step()):
            if any(each.status.name == "WAITING_FOR_REMOTE_KVS" for each in engine.scheduler.requests.values()):
                time.sleep(PAUSE_S)
        seconds = time.perf_counter() - began_s
        result = finished[0]
        assert result.request_id == name
        computed = sum(step.num_tokens for step in result.steps)
        return {"seconds": seconds, "computed": computed, "params": result.kv_transfer_params}

    def idle(self) -> int:
        """Step until no request is held. The number of free blocks."""
        self.engine.drain()
        return self.engine.num_free_blocks

    def traffic(self) -> dict[str, float]:
        """The connector's counters of reads since the start."""
        from vllm.v1.metrics.reader import Counter, Histogram

        found: dict[str, float] = {}
        for metric in self.engine.llm.get_metrics():
            word = WORDS.get(metric.name) or WORDS.get(f"{metric.name}_total")
            if word is not None and isinstance(metric, Counter | Histogram):
                found[word] = float(metric.sum if isinstance(metric, Histogram) else metric.value)
        return found

    def formula(self, num_tokens: int) -> dict[str, Any]:
        """The bytes of a request with `num_tokens` according to the group table."""
        engine = self.engine
        groups = resolve_groups(engine.llm.llm_engine.vllm_config, engine.kv_cache_config)
        table = [
            GroupBytes(spec, sum(layer.page_bytes for layer in layers))
            for spec, layers in zip(groups.specs, groups.layers, strict=True)
        ]
        return {
            "groups": [f"{row.spec.kind.name.lower()} {row.spec.block_tokens}" for row in table],
            "per_group_bytes": moved_bytes(table, num_tokens),
            "full_attention_bytes": full_attention_bytes(table, num_tokens),
        }


def widen_affinity(are_spinners_last: bool) -> None:
    """Undo settings of vLLM's connector that are bad for a small machine.

    It pins a CPU engine to the last core, which two engines would share. Each of NIXL's progress threads, which its
    connector needs, keeps one core busy; they can be given the lowest priority.
    """
    for task in Path("/proc/self/task").iterdir():
        number = int(task.name)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(number, range(os.cpu_count() or 1))
            if are_spinners_last and is_spinning(task):
                os.setpriority(os.PRIO_PROCESS, number, LAST_PRIORITY)


def is_spinning(task: Path) -> bool:
    """Whether a thread of an idle engine is running."""
    if int(task.name) == os.getpid():
        return False
    before = busy_ticks(task)
    time.sleep(0.1)
    return busy_ticks(task) - before >= 2


def busy_ticks(task: Path) -> int:
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def name_nixl() -> None:
    """Provide the module `nixl`, which vLLM imports and which only selects a build; if it is missing, use a build
    directly.
    """
    if importlib.util.find_spec("nixl") is not None:
        return
    for build in ("nixl_cu12", "nixl_cu13"):
        if importlib.util.find_spec(build) is not None:
            sys.modules["nixl"] = importlib.import_module(build)
            for part in ("_api", "_bindings"):
                sys.modules[f"nixl.{part}"] = importlib.import_module(f"{build}.{part}")
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("kind", "transfer", "arguments"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True, help="port of vLLM's side channel")
    parser.add_argument("--spinners-last", type=int, default=0)
    chosen = parser.parse_args()
    transfer = json.loads(chosen.transfer)
    answers = take_answers()
    # The settings of `hybridkv.peers` before it loads NIXL, for both connectors.
    os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(chosen.port)
    if transfer["kv_connector"] == "NixlConnector":
        name_nixl()
    register()
    arguments = json.loads(chosen.arguments)
    with running_engine(
        chosen.kind, chosen.directory, kv_transfer_config=transfer, disable_log_stats=False, **arguments
    ) as engine:
        widen_affinity(bool(chosen.spinners_last))
        PeerServing(engine).run(answers)


if __name__ == "__main__":
    main()
