"""Estimated reuse compared with an exact simulation: hit rates of public traces by size of the store, and time.

    python bench/reuse_estimate.py FOLDER

FOLDER: as for `reuse_traces.py`. A store of size 1 holds a tenth of all chunks of the trace. "attention": requests can
resume at every boundary; "states": only at the ends of prompts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from reuse_files import read_all

from hybridkv.cli.simulation.policies import PromptEnds
from hybridkv.cli.simulation.store import CostModel, simulate, unique_chunks
from hybridkv.cli.simulation.traces import Trace
from hybridkv.metrics import ReuseEstimator, ReuseReport

COSTS: Final = CostModel()
MULTIPLES: Final = (0.25, 0.5, 1, 2, 4, 8)


def estimate(trace: Trace, capacity: int, *, has_states: bool) -> tuple[ReuseReport, float]:
    """Returns the report, and microseconds for each chunk of a request."""
    chunk = trace.chunk_tokens
    state_bytes = COSTS.state_chunks * chunk if has_states else 0
    estimator = ReuseEstimator(capacity * chunk, chunk, chunk, state_bytes)
    stored: set[bytes] = set()
    num_chunks, seconds = 0, 0.0
    for request in trace.requests:
        end = (request.num_tokens - 1) // chunk
        chunks = [b"f%d" % name for name in request.chunks]
        states = [b"s%d" % name for name in request.chunks] if has_states else []
        used = [next((key for key in reversed(states[:end]) if key in stored), b""), *states[end - 1 : end]]
        used = list(dict.fromkeys(filter(None, used)))
        stored.update(used)
        path = [b"f%d" % name for name in (request.answered or request.chunks)]
        start = time.process_time()
        estimator.count_prompt(request.num_tokens, chunks[:end], states[:end])
        estimator.record_use(path, used)
        seconds += time.process_time() - start
        num_chunks += len(chunks)
    return estimator.report(), 1e6 * seconds / num_chunks


def main(folder: str) -> None:
    print("| trace | model | us a chunk | hit rate in percent, exact / estimated, by size |")
    print("| --- | --- | ---: | --- |")
    for trace in read_all(Path(folder)):
        capacity = unique_chunks(trace, COSTS) // 10
        for has_states in (False, True):
            report, micros = estimate(trace, capacity, has_states=has_states)
            rates = []
            for multiple in MULTIPLES:
                policy = PromptEnds() if has_states else None
                exact = simulate(trace, int(capacity * multiple), COSTS, policy).hit_rate
                share = report.restored_tokens(capacity * multiple * trace.chunk_tokens) / report.prompt_tokens
                rates.append(f"{multiple:g}: {100 * exact:.1f}/{100 * share:.1f}")
            model = "states" if has_states else "attention"
            print(f"| {trace.name} | {model} | {micros:.2f} | {', '.join(rates)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
