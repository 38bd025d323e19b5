"""Time to the first token of a prompt that another engine has computed, by the place from which it is restored.

    tools/bazel run //bench:fleet_ttft -- [--models NAME...] [--tokens N] [--rounds N] [--json FILE]

In each round a first engine computes a new prompt, stores it in an object store in a directory, and serves it to
peers. Three other engines get the same prompt, with one output token. The result is the seconds from the request to
this token, at an idle engine:
- `recompute`: another new prompt, without the connector.
- `object`: from the object store. `own`: the same prompt again, from the engine's own prefix cache. `ram`: once more,
  without this cache, from host memory.
- `peer`: from host memory of the first engine, over NIXL and the loopback.
- `disk`: from a local disk, after the engine itself computed the prompt and lost its host memory.
Engines take turns, so each computes alone. The first round connects and is not counted. A ratio is the median over
rounds of the time of `recompute` divided by the time from the place, in the same round.

Models are random and small, as in `engine_ttft.py`. Not measured: a network, a GPU, several requests at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from checkpoint_cost import Started, machine, ours, prompt_of, spread, written
from driven_process import DrivenProcess
from engine_ttft import ARGUMENTS, DISK_CAPACITY, MODELS, Model

PLACES = ("own", "ram", "disk", "peer", "object", "recompute")
LOOKUP_TIMEOUT_S = 5.0
"""Long, so that a slow machine does not cause a miss."""


def free_ports() -> Iterator[int]:
    """Ports of the loopback. Each is free, and so is the next one, which the engine's rank uses."""
    for port in range(20000 + os.getpid() % 10000, 32000, 2):  # below the ports that the system gives to clients
        try:
            for number in (port, port + 1):
                socket.create_server(("127.0.0.1", number)).close()
        except OSError:
            continue
        yield port


def transfer_of(*tiers: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` of an engine with host memory and these tiers."""
    transfer = ours("auto")
    transfer["kv_connector_extra_config"]["tiers"] += tiers
    transfer["kv_connector_extra_config"]["weights_digest"] = "full"
    return transfer


def turn(engines: Mapping[str, DrivenProcess], name: str, num_tokens: int) -> dict[str, Any]:
    """One round: the answers by place."""
    prompt, other = (prompt_of(num_tokens, (f"{name} {each}", num_tokens)) for each in ("shared", "other"))
    found: dict[str, Any] = {}
    engines["first"].ask("timed", prompt=prompt)
    fleet = engines["object"]
    fleet.ask("connect", is_on=False)
    fleet.ask("forget")
    found["recompute"] = fleet.ask("timed", prompt=other)
    fleet.ask("connect", is_on=True)
    fleet.ask("forget")
    found["object"] = fleet.ask("timed", prompt=prompt)
    found["own"] = fleet.ask("timed", prompt=prompt)
    fleet.ask("forget")
    found["ram"] = fleet.ask("timed", prompt=prompt)
    found["peer"] = engines["peer"].ask("timed", prompt=prompt)
    disk = engines["disk"]
    disk.ask("timed", prompt=prompt)
    disk.ask("forget_primary")
    found["disk"] = disk.ask("timed", prompt=prompt)
    return found


def measure(model: Model, num_tokens: int, num_rounds: int, num_threads: int) -> dict[str, Any]:
    """All rounds of one model: medians, ratios and hits by place."""
    with ExitStack() as kept:
        started = Started(kept, model.kind, "ttft_engine.py")
        arguments = ARGUMENTS | model.arguments
        ports = {name: f"127.0.0.1:{port}" for name, port in zip(("first", "peer"), free_ports(), strict=False)}
        peers = {"type": "peer", "peers": list(ports.values()), "lookup_timeout_seconds": LOOKUP_TIMEOUT_S}
        store = {"type": "object", "url": f"file://{started.directory / 'store'}", "cascade": "all"}
        store["lookup_timeout_seconds"] = LOOKUP_TIMEOUT_S
        disk = {"type": "disk", "path": str(started.directory / "tier"), "capacity": DISK_CAPACITY}
        transfers = {
            "first": transfer_of(peers | {"listen": ports["first"]}, store),
            "object": transfer_of(store),
            "peer": transfer_of(peers | {"listen": ports["peer"]}),
            "disk": transfer_of(disk),
        }
        engines = {name: started.engine(name, transfer, arguments) for name, transfer in transfers.items()}
        for engine in engines.values():
            engine.ask("set_threads", num_threads=num_threads)
        rounds = [turn(engines, f"round {number}", num_tokens) for number in range(1 + num_rounds)][1:]
    return {place: row(rounds, place) for place in PLACES}


def row(rounds: Sequence[Mapping[str, Any]], place: str) -> dict[str, Any]:
    """Milliseconds, hits, bytes, and the time of `recompute` divided by this time."""
    return {
        "ms": round(statistics.median(each[place]["seconds"] for each in rounds) * 1e3, 1),
        "recompute over it": spread([each["recompute"]["seconds"] / each[place]["seconds"] for each in rounds]),
        "hits": sorted({each[place]["hit"] for each in rounds}),
        "same token": place == "recompute" or all(each[place]["token"] == each["own"]["token"] for each in rounds),
    }


def show(name: str, num_tokens: int, found: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{name}, prompts of {num_tokens} tokens; in brackets quartiles over rounds")
    for place, each in found.items():
        end = "" if each["same token"] else "  OTHER TOKENS"
        ratio = written(each["recompute over it"])
        print(f"  {place:10} {each['ms']:8.1f} ms   recompute over it {ratio}   hit {each['hits']}{end}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the first token of a second engine.")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=4097)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="threads with which an engine computes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    models = {}
    for name in options.models:
        models[name] = measure(MODELS[name], options.tokens, options.rounds, options.threads)
        show(name, options.tokens, models[name])
    if options.json:
        about = machine(load_before) | {"tokens": options.tokens, "rounds": options.rounds}
        options.json.write_text(json.dumps({"about": about, "models": models}, indent=1) + "\n")


if __name__ == "__main__":
    main()
