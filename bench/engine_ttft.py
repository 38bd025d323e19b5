"""Time to the first token of whole engines: without a connector, and with one that finds nothing, stores, or loads.

    tools/bazel run //bench:engine_ttft -- [--models NAME...] [--tokens N] [--rounds N] [--json FILE]

Measures seconds from a request to its first token in an engine's process. Prompts share nothing and have one output
token each:
- `plain`: the connector is removed from the engine. `again` repeats this: the difference is the noise.
- `never`: with the connector, for a request with the hint `store: false`; no chunk is ever found.
- `storing`: a new prompt, with the connector.
- `own`: the prompt of `plain` again, without the connector: a hit in the engine's own prefix cache.
- `ram`, `disk`: the prompt of `storing` again, after the engine has dropped its own prefix cache: from host memory, and
  from disk after host memory was emptied too.
One process gets all of these requests, in an order that changes from round to round, so differences between processes
do not affect a ratio. Two such processes alternate: `ram` has only a tier in host memory, `ram+disk` also a disk tier.
`alone` is a third process that never had a connector. It shows effects that remain after the removal of the connector:
its work at the engine's start, and the engine's configuration.

The limit of a hit is the time of the engine's own hit, plus one step of the engine (which computes one token), plus 1.2
times a copy of the loaded bytes; for a hit on disk also plus 1.2 times a read of these bytes from the same disk,
without the page cache, by as many threads as the tier has calls in flight. Copy and read are measured in each round. A
ratio is the median over rounds, with its quartiles in brackets; `all` divides the sums over all rounds. The results
also have processor time of the engine's thread, and its part in the connector. Other load of the machine hardly changes
these times, but they do not include waits, other threads, or the engine's own work for a connector.

Models are random and small: `gemma3` has five windows and one full attention, `qwen3-next` six recurrent layers and two
of full attention, `gpt-oss` four windows and four layers of full attention. Host memory has room for a few prompts and
is filled before the first round, which is not counted. So stores write to memory that the operating system has already
provided, and evict chunks. This is not true with a disk, because host memory is emptied in each round. With `--fresh`,
host memory has room for all prompts and is not filled: each store is the first to touch its memory.

Not measured: a GPU, several requests at a time, answers, prompts that share a part.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint_cost import Started, machine, ours, prompt_of, spread, written
from driven_process import DrivenProcess

ALONE, RAM, DISK = "alone", "ram", "ram+disk"
COLD = ("plain", "again", "never", "storing")
NO_STORE = {"store": False}
GOALS = {"never": 1.01, "storing": 1.03}
"""Limits for the ratios of times to `plain`."""
SPARE = 1.2
"""Factor for the time of a copy or a read of the bytes in the limit of a hit."""
NUM_STEPS = 8
READ_BYTES = 1 << 20
READ_THREADS = 8
"""Number of threads that read; equal to the tier's calls in flight."""
NUM_READS = 3
ROOM, FRESH_ROOM = "128MiB", "8GiB"
"""Capacities of host memory."""
MAX_FILLING = 64
"""Limit for the prompts that fill host memory."""
DISK_CAPACITY = "8GiB"
ARGUMENTS = {"max_num_batched_tokens": 2048, "disable_log_stats": False}


class Model(NamedTuple):
    """A tiny model, and arguments of its engine."""

    kind: str
    arguments: dict[str, Any]


def _eight_layers() -> dict[str, Any]:
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(8)]
    return {"hf_overrides": {"num_hidden_layers": 8, "layer_types": kinds}, "load_format": "dummy"}


MODELS = {
    "gemma3": Model("gemma3", {}),
    "qwen3-next": Model("qwen3-next", {}),
    "gpt-oss": Model("gpt-oss", _eight_layers()),
}


class Chosen(NamedTuple):
    """Arguments of the program."""

    tokens: int
    rounds: int
    threads: int
    fresh: bool


class Subject:
    """An engine with a connector.

    Args:
        engine: process of `ttft_engine.py`.
        disk: directory on the disk of the connector's disk tier; None without such a tier.
        name: seed of the prompts.
    """

    def __init__(self, engine: DrivenProcess, disk: Path | None, name: str) -> None:
        self._engine = engine
        self._disk = disk
        self._name = name
        self._hit_bytes = 1

    def fill(self, num_tokens: int) -> None:
        """Stores prompts until one evicts another."""
        for number in range(MAX_FILLING):
            if self._timed(prompt_of(num_tokens, (f"{self._name} fill {number}", num_tokens)))["evicted_bytes"]:
                return

    def turn(self, number: int, num_tokens: int) -> dict[str, dict[str, Any]]:
        """One round: the measurements of each side."""
        first = number % len(COLD)
        order = (COLD[first:] + COLD[:first])[:: 1 if number % 2 else -1]
        found: dict[str, dict[str, Any]] = {}
        for side in order:
            prompt = prompt_of(num_tokens, (f"{self._name} {number} {side}", num_tokens))
            self._engine.ask("connect", is_on=side in ("never", "storing"))
            self._engine.ask("forget")
            found[side] = self._timed(prompt, NO_STORE if side == "never" else None)
            if side == "plain":
                found["own"] = self._timed(prompt)
                found["step"] = {"seconds": self._engine.ask("step_seconds", prompt=prompt, num_steps=NUM_STEPS)}
            elif side == "storing":
                self._engine.ask("forget")
                found["ram"] = self._timed(prompt)
                self._hit_bytes = found["ram"]["load_bytes"] or 1
                if self._disk is not None:
                    self._engine.ask("forget_primary")
                    found["disk"] = self._timed(prompt)
        found["copy"] = {"seconds": self._engine.ask("copy_seconds", num_bytes=self._hit_bytes, times=5)}
        if self._disk is not None:
            found["read"] = {"seconds": read_seconds(self._disk, self._hit_bytes)}
        return found

    def _timed(self, prompt: Sequence[int], hints: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = self._engine.ask("timed", prompt=prompt, hints=hints)
        return answer


def read_seconds(directory: Path, num_bytes: int) -> float:
    """Median seconds of reads of `num_bytes` of a file, without the page cache."""
    num_pieces = -(-num_bytes // READ_BYTES)
    path = directory / "read"
    with path.open("wb") as file:
        file.write(random.Random(0).randbytes(READ_BYTES) * num_pieces)
        os.fsync(file.fileno())
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    times_s = []
    try:
        with mmap.mmap(-1, num_pieces * READ_BYTES) as memory, ThreadPoolExecutor(READ_THREADS) as threads:
            pieces = [memoryview(memory)[at : at + READ_BYTES] for at in range(0, len(memory), READ_BYTES)]
            for _ in range(1 + NUM_READS):
                began_s = time.perf_counter()
                list(
                    threads.map(
                        lambda number: os.preadv(descriptor, [pieces[number]], number * READ_BYTES), range(num_pieces)
                    )
                )
                times_s.append(time.perf_counter() - began_s)
            for piece in pieces:
                piece.release()
    finally:
        os.close(descriptor)
        path.unlink()
    return statistics.median(times_s[1:])  # the first read touches the memory


Rounds = Sequence[Mapping[str, Mapping[str, Any]]]


def row(rounds: Rounds) -> dict[str, Any]:
    """Results of one engine: milliseconds, and ratios within rounds."""
    names = list(rounds[0])
    result: dict[str, Any] = {
        "ms": {name: _median_ms(each[name]["seconds"] for each in rounds) for name in names},
        "engine cpu ms": {
            name: _median_ms(each[name]["engine_cpu"] for each in rounds) for name in (*COLD, "own", "ram")
        },
        "connector cpu ms": {
            name: _median_ms(each[name]["connector_cpu"] for each in rounds)
            for name in (*COLD, *sorted(_WARM & set(names)))
        },
        "connector cpu over plain": {
            name: spread([each[name]["connector_cpu"] / each["plain"]["engine_cpu"] for each in rounds])
            for name in COLD[2:]
        },
        "copy cpu ms": {name: _median_ms(each[name]["copy_cpu"] for each in rounds) for name in ("storing", "ram")},
        "bytes": {name: rounds[-1][side][name] for side, name in (("storing", "store_bytes"), ("ram", "load_bytes"))},
        "hits": {name: sorted({each[name]["hit"] for each in rounds}) for name in names if "hit" in rounds[0][name]},
        "same tokens": all(
            each[name]["token"] == each["storing"]["token"] for each in rounds for name in _WARM & each.keys()
        ),
    }
    for what in ("seconds", "engine_cpu"):
        result[f"{what} over plain"] = {name: _over(rounds, what, name, "plain") for name in COLD[1:]}
    limits = {name: [limit(each, name) for each in rounds] for name in _WARM & set(names)}
    result["limit ms"] = {name: _median_ms(each) for name, each in limits.items()}
    result["over limit"] = {
        name: spread([each[name]["seconds"] / limit_s for each, limit_s in zip(rounds, limits_s, strict=True)])
        for name, limits_s in limits.items()
    }
    return result


_WARM = {"ram", "disk"}


def limit(found: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """Limit in seconds for a hit from this tier."""
    seconds = {each: found[each]["seconds"] for each in ("own", "step", "copy", "read") if each in found}
    from_disk = SPARE * seconds["read"] if name == "disk" else 0.0
    return seconds["own"] + seconds["step"] + SPARE * seconds["copy"] + from_disk


def _median_ms(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


def _over(rounds: Rounds, what: str, name: str, other: str) -> dict[str, Any]:
    total = sum(each[name][what] for each in rounds) / sum(each[other][what] for each in rounds)
    return {"spread": spread([each[name][what] / each[other][what] for each in rounds]), "all": round(total, 4)}


def measure(model: Model, chosen: Chosen) -> dict[str, Any]:
    """All rounds of one model."""
    num_tokens, num_rounds = chosen.tokens, chosen.rounds
    with ExitStack() as kept:
        started = Started(kept, model.kind, "ttft_engine.py")
        arguments = ARGUMENTS | model.arguments
        alone = started.engine(ALONE, None, arguments)
        path = started.directory / "tier"
        disk = {"type": "disk", "path": str(path), "capacity": DISK_CAPACITY}
        subjects = {}
        for name, slower in ((RAM, []), (DISK, [disk])):
            transfer = ours("auto", FRESH_ROOM if chosen.fresh else ROOM)
            transfer["kv_connector_extra_config"]["tiers"] += slower
            engine = started.engine(name, transfer, arguments)
            engine.ask("set_threads", num_threads=chosen.threads)
            subjects[name] = Subject(engine, started.directory if slower else None, name)
            if not chosen.fresh:
                subjects[name].fill(num_tokens)
        alone.ask("set_threads", num_threads=chosen.threads)
        rounds: dict[str, list[dict[str, dict[str, Any]]]] = {name: [] for name in subjects}
        alone_s = []
        for number in range(1 + num_rounds):
            for name in list(subjects)[:: 1 if number % 2 else -1]:
                rounds[name].append(subjects[name].turn(number, num_tokens))
            alone.ask("forget")
            prompt = prompt_of(num_tokens, (f"{ALONE} {number}", num_tokens))
            alone_s.append(alone.ask("timed", prompt=prompt)["seconds"])
    found: dict[str, Any] = {name: row(each[1:]) for name, each in rounds.items()}
    plain = rounds[RAM]
    ratios = [plain[number]["plain"]["seconds"] / alone_s[number] for number in range(1, 1 + num_rounds)]
    found[ALONE] = {"ms": _median_ms(alone_s[1:]), "plain of ram over it": spread(ratios)}
    return found


def show(name: str, num_tokens: int, found: Mapping[str, Any]) -> None:
    print(f"\n{name}, prompts of {num_tokens} tokens; milliseconds, in brackets quartiles over rounds")
    for subject in (RAM, DISK):
        print(f"  {subject}: " + ", ".join(f"{side} {ms:.1f}" for side, ms in found[subject]["ms"].items()))
        show_subject(found[subject])
    alone = found[ALONE]
    print(f"  alone {alone['ms']:.1f}, plain of ram over it {written(alone['plain of ram over it'])}", flush=True)


def show_subject(found: Mapping[str, Any]) -> None:
    for side in COLD[1:]:
        wall, cpu = found["seconds over plain"][side], found["engine_cpu over plain"][side]
        print(
            f"    {side:8} over plain {written(wall['spread'])}, all {wall['all']:.3f}; "
            f"processor {written(cpu['spread'])}, all {cpu['all']:.3f}; "
            + (f"goal {GOALS[side]}" if side in GOALS else "noise")
        )
    for side, ratio in found["over limit"].items():
        limit_ms, hit = found["limit ms"][side], found["hits"][side]
        print(f"    {side:8} limit {limit_ms:.1f}, over it {written(ratio)}; hit {hit}")
    shares = {side: written(each) for side, each in found["connector cpu over plain"].items()}
    print(f"    processor in the connector {found['connector cpu ms']}, over plain {shares}")
    end = "" if found["same tokens"] else "  OTHER TOKENS"
    print(f"    bytes {found['bytes']}, copy thread {found['copy cpu ms']}{end}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the first token of whole engines.")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=7937)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1, help="threads with which an engine computes")
    parser.add_argument("--fresh", action="store_true", help="let each store be the first to touch its memory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    chosen = Chosen(options.tokens, options.rounds, options.threads, options.fresh)
    models = {}
    for name in options.models:
        models[name] = measure(MODELS[name], chosen)
        show(name, options.tokens, models[name])
    if options.json:
        about = machine(load_before) | chosen._asdict()
        options.json.write_text(json.dumps({"about": about, "models": models}, indent=1) + "\n")


if __name__ == "__main__":
    main()
