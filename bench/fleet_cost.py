"""Requests, bytes and cost of an object store that 1, 100 and 10,000 engines share, simulated on public traces.

    python bench/fleet_cost.py --traces FOLDER --json fleet_cost.json

These parts are the real code: the indexes of host memory and of the store, the search for a manifest, the assignment of
chunks to packs, the choice of manifests to write, and their bytes. A test compares the counts with those of the real
tier over a directory.

Modelled: requests arrive at the times of the trace. An engine computes missing tokens at `--tokens-per-second`, and
stores after each step of 8,192 tokens; manifests are visible 0.2 s later. Each engine gets `--tokens-per-second` of
prompts. The trace, or a sample of its conversations, is a part of this load. The rest of the load only fills host
memory with prompts that share nothing with the trace. With round robin, each request goes to a random engine. With
affinity, it goes to the engine that served the longest part of its prefix, if this part is at least half of the prompt.

Not modelled: answers; the engine's own cache; disks; failures, retries and refusals of the store; renewals and expiry;
budgets; time that requests wait for each other, for lookups or for reads; parts of a chunk; ranks (packs and range
reads multiply by their number). All engines start empty, and a sample has few requests for each of 10,000 engines: data
that each engine reads once, such as a system prompt, counts too much there.

`--burst S` adds prompts with one common new beginning of 4,096 tokens and different ends, which arrive at random times
within S seconds, two for each engine.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fleet_model import FleetCounts, FleetSettings, SimulatedStore, TimedRequest, run_fleet
from reuse_files import read_all

from hybridkv.cli.simulation.traces import CHARACTERS_PER_TOKEN, Trace, TraceRequest, chained

GETS_PER_S: Final = 5500
PUTS_PER_S: Final = 3500
"""Limit of requests per second that S3 documents for one prefix of a bucket."""
EPOCH_CHECK_S: Final = 60
CHUNK_TOKENS: Final = 128
SHARED_CHUNKS, OWN_CHUNKS = 32, 4
"""Chunks of a prompt in a burst."""
BURST_PER_ENGINE: Final = 2
BURST_RAM_BYTES: Final = 2 << 30
"""Room for all prompts of an engine's burst, and for the indexes of 10,000 engines."""


def read_timed(folder: Path) -> list[tuple[Trace, list[TimedRequest]]]:
    """Reads the traces, with the seconds since their start."""
    files = {
        "conversation": ([folder / "mooncake_conversation_trace.jsonl"], 1e-3),
        "synthetic": ([folder / "mooncake_synthetic_trace.jsonl"], 1e-3),
        "agents": (sorted((folder / "magagent").glob("*.jsonl")), 1e-6),
    }
    found = []
    for trace in read_all(folder):
        paths, unit_s = files[trace.name]
        lines = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line]
        lines = [line for line in lines if "hash_ids" in line or len(line["input"]) >= CHARACTERS_PER_TOKEN]
        times = sorted(line["timestamp"] for line in lines)
        requests = [
            TimedRequest((at - times[0]) * unit_s, request) for at, request in zip(times, trace.requests, strict=True)
        ]
        found.append((trace, requests))
    return found


def sample(requests: Sequence[TimedRequest], share: float) -> list[TimedRequest]:
    """A sample of whole conversations, about this share of all. Requests with equal second chunks stay together."""
    if share >= 1:
        return list(requests)
    rng = random.Random(1)
    chosen: dict[int, bool] = {}
    kept = []
    for each in requests:
        chunks = each.request.chunks
        name = chunks[min(1, len(chunks) - 1)] if chunks else -1
        if name not in chosen:
            chosen[name] = rng.random() < share
        if chosen[name]:
            kept.append(each)
    return kept


def burst(num_engines: int, seconds: float) -> list[TimedRequest]:
    """Prompts with one common new beginning, at random times."""
    rng = random.Random(2)
    num = num_engines * BURST_PER_ENGINE
    times = sorted(rng.uniform(0, seconds) for _ in range(num))
    chunks = SHARED_CHUNKS + OWN_CHUNKS
    contents = (
        (
            chunks * CHUNK_TOKENS + 1,
            [("shared", place) for place in range(SHARED_CHUNKS)] + [("own", number)] * OWN_CHUNKS,
        )
        for number in range(num)
    )
    trace: tuple[TraceRequest, ...] = chained("burst", CHUNK_TOKENS, contents).requests
    return [TimedRequest(at, request) for at, request in zip(times, trace, strict=True)]


def cost_of(counts: FleetCounts, kept_bytes: int, options: argparse.Namespace) -> dict[str, float]:
    """Dollars for a million prompt tokens."""
    millions = counts.total_tokens / 1e6
    return {
        "put": counts.puts / 1000 * options.put_price / millions,
        "get": counts.gets / 1000 * options.get_price / millions,
        "kept": kept_bytes / 1e9 * options.storage_price * options.keep_days / 30 / millions,
    }


def row_of(
    name: str, settings: FleetSettings, num: int, store: SimulatedStore, options: argparse.Namespace
) -> dict[str, Any]:
    """Result of one run.

    `per_million` and `dollars` are for a million prompt tokens. `dollars_per_restored_million` is for a million tokens
    that only the store restored, not host memory. `engines_for_one_prefix` engines reach S3's limit for one prefix of a
    bucket.
    """
    counts, kept_bytes = store.counts, store.kept_bytes
    millions = counts.total_tokens / 1e6
    fleet_millions_per_s = settings.num_engines * settings.tokens_per_s / 1e6
    hottest = max(counts.gets_of.values(), default=0)
    dollars = cost_of(counts, kept_bytes, options)
    gain = (counts.hit_tokens - counts.ram_tokens) / counts.total_tokens
    return {
        "trace": name,
        "engines": settings.num_engines,
        "cascade": "all" if settings.cascades_all else "reused",
        "routing": "affinity" if settings.by_affinity else "round robin",
        "requests": num,
        "tokens": counts.total_tokens,
        "hit_rate": round(counts.hit_tokens / counts.total_tokens, 4),
        "ram_hit_rate": round(counts.ram_tokens / counts.total_tokens, 4),
        "per_million": {kind: round(count / millions, 2) for kind, count in sorted(counts.requests.items())}
        | {
            "lookups": round(counts.num_lookups / millions, 2),
            "PUT": round(counts.puts / millions, 2),
            "GET": round(counts.gets / millions, 2),
            "GB up": round(counts.bytes_up / 1e9 / millions, 3),
            "GB down": round(counts.bytes_down / 1e9 / millions, 3),
            "GB kept": round(kept_bytes / 1e9 / millions, 3),
        },
        "dollars": {part: round(price, 5) for part, price in dollars.items()},
        "dollars_per_restored_million": round(sum(dollars.values()) / gain, 3) if gain else None,
        "duplicate_share": round(counts.num_duplicates / max(1, counts.num_chunks), 4),
        "hottest_share_of_gets": round(hottest / max(1, counts.gets), 4),
        "fleet_per_s": {
            "PUT": round(counts.puts / millions * fleet_millions_per_s, 1),
            "GET": round(counts.gets / millions * fleet_millions_per_s, 1),
            "epoch GET": round(settings.num_engines / EPOCH_CHECK_S, 2),
            "GB up": round(counts.bytes_up / 1e9 / millions * fleet_millions_per_s, 2),
            "GB down": round(counts.bytes_down / 1e9 / millions * fleet_millions_per_s, 2),
        },
        "engines_for_one_prefix": {
            "PUT": round(PUTS_PER_S / max(1e-9, counts.puts / millions * settings.tokens_per_s / 1e6)),
            "GET": round(GETS_PER_S / max(1e-9, counts.gets / millions * settings.tokens_per_s / 1e6)),
        },
    }


def run_trace(trace: Trace, requests: Sequence[TimedRequest], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All fleets on one trace."""
    tokens = sum(each.request.num_tokens for each in requests)
    trace_tokens_per_s = tokens / max(1.0, requests[-1].at_s)
    rows = []
    for num_engines in options.engines:
        fleet_tokens_per_s = num_engines * options.tokens_per_second
        share = min(1.0, fleet_tokens_per_s / trace_tokens_per_s, options.requests / len(requests))
        taken = sample(requests, share)
        taken_tokens = sum(each.request.num_tokens for each in taken)
        load_share = min(1.0, taken_tokens / max(1.0, requests[-1].at_s) / fleet_tokens_per_s)
        for by_affinity in (False, True) if num_engines > 1 else (False,):
            for cascades_all in (False, True):
                settings = settings_of(options, num_engines, by_affinity=by_affinity, cascades_all=cascades_all)
                began_s = time.perf_counter()
                store = run_fleet(taken, settings, trace.chunk_tokens, load_share)
                rows.append(row_of(trace.name, settings, len(taken), store, options))
                show(rows[-1], time.perf_counter() - began_s)
    return rows


def run_burst(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every engine gets prompts with one new beginning at about the same time."""
    rows = []
    for num_engines in options.engines:
        for cascades_all in (False, True):
            settings = settings_of(options, num_engines, by_affinity=False, cascades_all=cascades_all)
            settings = replace(settings, ram_bytes=min(settings.ram_bytes, BURST_RAM_BYTES))
            requests = burst(num_engines, options.burst)
            began_s = time.perf_counter()
            store = run_fleet(requests, settings, CHUNK_TOKENS)
            row = row_of("burst", settings, len(requests), store, options)
            counts = store.counts
            row["totals"] = dict(counts.requests) | {
                "duplicates": counts.num_duplicates,
                "chunks": counts.num_chunks,
                "GET of the hottest object": max(counts.gets_of.values(), default=0),
            }
            rows.append(row)
            show(row, time.perf_counter() - began_s)
            print("   ", row["totals"], flush=True)
    return rows


def settings_of(
    options: argparse.Namespace, num_engines: int, *, by_affinity: bool, cascades_all: bool
) -> FleetSettings:
    """Settings of a fleet."""
    return FleetSettings(
        num_engines,
        cascades_all=cascades_all,
        by_affinity=by_affinity,
        chunk_tokens=CHUNK_TOKENS,
        full_bytes=CHUNK_TOKENS * options.full_bytes,
        window_bytes=CHUNK_TOKENS * options.window_bytes,
        ram_bytes=int(options.ram_gib * 2**30),
        tokens_per_s=options.tokens_per_second,
    )


def show(row: dict[str, Any], took_s: float) -> None:
    """Print one line."""
    per, dollars = row["per_million"], row["dollars"]
    print(
        f"{row['trace']:12} {row['engines']:6} {row['routing']:11} {row['cascade']:6}"
        f" hit {100 * row['hit_rate']:5.1f} % (ram {100 * row['ram_hit_rate']:5.1f} %)"
        f" PUT {per['PUT']:7.0f} GET {per['GET']:7.0f}"
        f" GB up {per['GB up']:6.2f} down {per['GB down']:6.2f} kept {per['GB kept']:6.2f}"
        f"  $ {sum(dollars.values()):.4f} dup {100 * row['duplicate_share']:.1f} %"
        f" ({took_s:.0f} s, {row['requests']} requests)",
        flush=True,
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with the public traces, see reuse_traces.py")
    parser.add_argument("--names", nargs="+", default=["conversation", "agents"], help="traces to run")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 100, 10_000])
    parser.add_argument("--requests", type=int, default=1000, help="approximate number of requests of the sample")
    parser.add_argument("--tokens-per-second", type=float, default=10_000.0, help="prompt tokens of each engine")
    parser.add_argument("--ram-gib", type=float, default=64.0, help="host memory of each engine")
    parser.add_argument("--full-bytes", type=int, default=36_864, help="full attention, bytes a token (gpt-oss 120B)")
    parser.add_argument("--window-bytes", type=int, default=36_864, help="windows, bytes a token; 0: no such group")
    parser.add_argument("--put-price", type=float, default=0.005, help="dollars for 1,000 PUT")
    parser.add_argument("--get-price", type=float, default=0.0004, help="dollars for 1,000 GET")
    parser.add_argument("--storage-price", type=float, default=0.023, help="dollars for a GB and month")
    parser.add_argument("--keep-days", type=float, default=3.0, help="days from the last write until objects expire")
    parser.add_argument("--burst", type=float, help="also a burst of this many seconds")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    rows = [
        row
        for trace, requests in read_timed(options.traces)
        if trace.name in options.names
        for row in run_trace(trace, requests, options)
    ]
    if options.burst:
        rows += run_burst(options)
    if options.json:
        given = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        options.json.write_text(json.dumps({"options": given, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
