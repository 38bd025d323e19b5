"""Cost of the whole life of a request to the scheduler's thread, compared with vLLM's own offloading, in one process.

vLLM's side runs the real `OffloadingConnectorScheduler` over the real `CPUOffloadingManager` (LRU) twice: `vllm chunk`
has the number of blocks per chunk that our chunks have in full attention; `vllm default` has vLLM's default of one.
Our side runs the connector's `OffloadScheduler` over a `TierStack` of one `RamIndex`, with the connector's own choice
of the chunk. Both have vLLM's real `BlockPool`, tables as in its manager, and its real `SchedulerOutput`s
(`life_engine.py`). A worker only reports, one step later, that the planned work is done.

The parts of a life:
- `begin` on_new_request; `lookup` get_num_new_matched_tokens; `allocation` update_state_after_alloc; `sources`
  get_external_cache_hit_sources, for the engine's counters (nothing for our single tier);
- `load plan` build_connector_meta while the request waits; `load end` update_connector_output with the end of the load;
- `first step` the second update_state_after_alloc, and build_connector_meta of the first step after a hit; `prefill`
  build_connector_meta of the other steps of up to 8,192 tokens; `decode` of steps with one token each;
- `step end` update_connector_output of all other steps, including the ends of stores; `report` the counters and events
  that the engine reads in each step; `finish` request_finished, and the two steps after it.

The goals are for the total and for the worst single step. A step has all calls between one build_connector_meta and the
next, each call in the step in which the engine makes it.

Scenarios: `miss`, `half` of the prompt stored, `full`. The tier is always full (if necessary with another prompt), so
every store evicts. Both sides store new prompts; vLLM's default stores no answers.

Further measurements: a step of `running` requests of one length that all decode (not with `vllm default`, which needs
minutes to start); `abort` of a request during its load; `preemption` of a decoding request, until it decodes again; the
time to `encode` and to decode a plan (with pickle, as for workers) and its size; and, of Python's garbage collector,
the pause for all objects of the `running` requests and the tier, and its time in one life with the collector on, frozen
at the start as in vLLM.

Not measured on either side: hashing, the engine's own blocks and tables, workers. Requests have the attributes that are
read; block hashes are random bytes. Times are CPU time of the thread, medians of `--rounds` with alternating sides,
after one round that is not counted. The collector is off except where it is measured.

    python bench/request_life.py --json request_life.json

A run of some cases replaces these cases in the file and keeps the other cases.
"""

import argparse
import gc
import json
import os
import pickle
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from life_driver import Driver, LifeTimes, append_token
from life_engine import STEP_TOKENS, Step
from life_prompts import SCENARIOS, Prompts
from life_sides import Side
from planner_lookup import PRESETS
from vllm.v1.request import RequestStatus

TOKENS = (8192, 131072, 1048576)
RUNNING_TOKENS = 131072
DECODED_TOKENS = 32
STAGGER_TOKENS = 16
"""Maximum difference in tokens between concurrent requests, so that some requests begin a block in each step."""
ROUNDS = {8192: 9, 131072: 5}
"""More rounds for short prompts; 3 for all others."""


def measure_lives(prompts: Prompts, rounds: int) -> dict[str, Any]:
    """Measures whole lives. The sides alternate."""
    sides = {name: prompts.open(name) for name in prompts.side_names}
    lives: dict[str, list[LifeTimes]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    for number in range(rounds + 1):
        hashes = prompts.next_hashes()
        for name in list(sides) if number % 2 else reversed(sides):
            times = LifeTimes()
            Driver(sides[name], times).live(prompts.request(hashes), DECODED_TOKENS)
            lives[name] += [times] if number else []
    gc.enable()
    return {name: summary(of_side) for name, of_side in lives.items()}


def summary(lives: list[LifeTimes]) -> dict[str, Any]:
    """Medians of lives with equal hits and work."""
    parts = dict.fromkeys(part for times in lives for part in times.us)
    assert len({(times.hit_tokens, times.work) for times in lives}) == 1, "lives differ in hits or work"
    return {
        "us": {part: statistics.median(times.us.get(part, 0.0) for times in lives) for part in parts},
        "total_us": statistics.median(times.total_us for times in lives),
        "worst_step_us": statistics.median(times.worst_us for times in lives),
        "hit_tokens": lives[0].hit_tokens,
        "loaded_blocks": lives[0].work.num_loaded,
        "stored_full_blocks": lives[0].work.num_stored_full,
    }


def measure_running(prompts: Prompts, name: str, num_requests: int) -> dict[str, float]:
    """Measures a step of requests that all decode, and a pause of the collector with the objects of requests and
    tier."""
    gc.collect()
    gc.freeze()
    side = prompts.open(name, num_requests)
    gc.collect()
    gc.disable()
    driver, hashes, requests = Driver(side, LifeTimes()), prompts.next_hashes(), []
    for number in range(num_requests):
        request = prompts.request(hashes, number % STAGGER_TOKENS)
        found = driver.begin(request)
        assert found == prompts.hit_tokens, "the stores of other requests evicted the common prefix"
        driver.load(request, found)
        if requests:
            side.engine.share(request, requests[0])
        driver.compute(request)
        requests.append(request)
    driver.times = LifeTimes()
    for _ in range(DECODED_TOKENS):
        for request in requests:
            append_token(request, side.engine.hash_tokens)
        driver.step("decode", Step(dict.fromkeys(requests, 1)))
    steps_us = driver.times.steps_us
    start = time.thread_time_ns()
    gc.collect()
    pause_us = (time.thread_time_ns() - start) / 1000
    gc.enable()
    gc.unfreeze()
    return {"step_us": statistics.median(steps_us), "worst_step_us": max(steps_us), "collection_us": pause_us}


def measure_besides(prompts: Prompts, name: str) -> dict[str, Any]:
    """Measures an abort, a preemption, the encoding of a plan, and a life with the collector on."""
    side = prompts.open(name)
    driver, hashes = Driver(side, LifeTimes(keeps_plans=True)), prompts.next_hashes()
    gc.collect()
    gc.disable()
    for _ in range(2):  # the first round is not counted
        request = prompts.request(hashes)
        driver.load(request, driver.begin(request))
        plan = driver.times.plans[-2]
        driver.compute(request)
        driver.times = LifeTimes()
        driver.preempt(request)
        preemption = driver.times
        driver.finish(request)
        request = prompts.request(hashes)
        driver.begin(request)
        driver.step("load plan", Step())
        driver.times = LifeTimes(keeps_plans=True)
        driver.finish(request, RequestStatus.FINISHED_ABORTED)
        abort = driver.times
    start = time.thread_time_ns()
    encoded = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
    middle = time.thread_time_ns()
    pickle.loads(encoded)
    end = time.thread_time_ns()
    gc.enable()
    return {
        "abort_us": abort.total_us,
        "preemption_us": preemption.total_us,
        "preemption_worst_step_us": preemption.worst_us,
        "plan_bytes": len(encoded),
        "encode_us": (middle - start) / 1000,
        "decode_us": (end - middle) / 1000,
        "collector": measure_collector(prompts, side, hashes),
    }


def measure_collector(prompts: Prompts, side: Side, hashes: list[bytes]) -> dict[str, float]:
    """Time of Python's collector in one life."""
    pauses_us: list[float] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        now_us = time.thread_time_ns() / 1000
        if phase == "start":
            pauses_us.append(-now_us)
        else:
            pauses_us[-1] += now_us

    times, request = LifeTimes(), prompts.request(hashes)
    gc.collect()
    gc.freeze()
    gc.callbacks.append(watch)
    Driver(side, times).live(request, DECODED_TOKENS)
    gc.callbacks.remove(watch)
    gc.unfreeze()
    return {"total_us": sum(pauses_us), "worst_us": max(pauses_us, default=0.0), "number": len(pauses_us)}


def ratios(sides: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """vLLM's time over ours."""
    ours = sides["ours"]
    return {
        name: {what: theirs[f"{what}_us"] / ours[f"{what}_us"] for what in ("total", "worst_step")}
        for name, theirs in sides.items()
        if name != "ours"
    }


def show_lives(title: str, sides: dict[str, dict[str, Any]]) -> None:
    print(f"{title}: hit {sides['ours']['hit_tokens']}, ms")
    for name, side in sides.items():
        parts = "  ".join(f"{part} {us / 1000:.2f}" for part, us in side["us"].items())
        total_ms, worst_ms = side["total_us"] / 1000, side["worst_step_us"] / 1000
        print(f"   {name:12} total {total_ms:.2f}  worst step {worst_ms:.2f}  ({parts})")
    for name, found in ratios(sides).items():
        print(f"   {name} / ours: total {found['total']:.2f}x  worst step {found['worst_step']:.2f}x")


def measure_preset(preset: str, arguments: argparse.Namespace) -> dict[str, Any]:
    lives = []
    for asked_tokens in arguments.tokens:
        for scenario in arguments.scenarios:
            prompts = Prompts(preset, asked_tokens, scenario)
            rounds = arguments.rounds or ROUNDS.get(asked_tokens, 3)
            sides = measure_lives(prompts, rounds)
            num_tokens = prompts.stored_tokens + 1
            show_lives(f"{preset} {num_tokens} tokens, {scenario}", sides)
            case = {"tokens": num_tokens, "asked_tokens": asked_tokens, "scenario": scenario, "rounds": rounds}
            case["load_average"] = os.getloadavg()[0]
            lives.append({**case, "sides": sides, "ratios": ratios(sides)})
    found: dict[str, Any] = {"lives": lives}
    prompts = Prompts(preset, arguments.running_tokens, "full")
    if arguments.running:
        running = {name: measure_running(prompts, name, arguments.running) for name in prompts.side_names[:2]}
        found["running"] = {"requests": arguments.running, "tokens": prompts.stored_tokens + 1, "sides": running}
        besides = {name: measure_besides(prompts, name) for name in prompts.side_names}
        found["besides"] = {"tokens": prompts.stored_tokens + 1, "sides": besides}
        for name in prompts.side_names:
            print(f"   {name:12} running {running.get(name)}")
            print(f"   {name:12} besides {besides[name]}")
    return found


def save(path: Path, preset: str, found: dict[str, Any]) -> None:
    """Writes the results to the file. Replaces the same cases, and keeps all others."""
    known = json.loads(path.read_text()) if path.exists() else {}
    of_preset = known.setdefault("presets", {}).setdefault(preset, {"lives": []})
    new = {(life["asked_tokens"], life["scenario"]) for life in found["lives"]}
    kept = [life for life in of_preset["lives"] if (life["asked_tokens"], life["scenario"]) not in new]
    of_preset |= found | {"lives": kept + found["lives"]}
    known["about"] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "step_tokens": STEP_TOKENS,
        "decoded_tokens": DECODED_TOKENS,
    }
    path.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="lives of requests compared with vLLM")
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS), help="empty: no lives")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=0, help="for each case; 0: 9, 5 and 3, fewer for longer prompts")
    parser.add_argument("--running", type=int, default=256, help="requests that decode concurrently; 0: skip this")
    parser.add_argument("--running-tokens", type=int, default=RUNNING_TOKENS)
    parser.add_argument("--json", type=Path, default=Path("request_life.json"), help="file for the figures")
    arguments = parser.parse_args()
    for preset in arguments.presets:
        save(arguments.json, preset, measure_preset(preset, arguments))


if __name__ == "__main__":
    main()
