"""The engines for prompts with common prefixes, and their requests."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trial as trials
from async_cpu import asynchronous_scheduling
from audit import stored_views
from families import FAMILIES, Family
from harness import Engine, Result
from shared_prefixes import CHAT_TURNS, Tokens, Workloads
from trial import Trial

from hybridkv.planner import GroupKind

MODEL: Final = os.environ.get("HYBRIDKV_E2E_PREFIX_MODEL", "qwen3-next")
IS_ASYNCHRONOUS: Final = os.environ.get("HYBRIDKV_E2E_SCHEDULING", "sync") == "async"

_MAMBA2: Final[dict[str, Any]] = {"max_model_len": 2048, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 256}
ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "qwen3-next": {
        "block_size": 128,
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 256,
    },
    "lfm2": {"max_model_len": 1024, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 256},
    "granite-4": _MAMBA2,
    "nemotron-h": _MAMBA2,
    "falcon-h1": _MAMBA2,
    "zamba2": _MAMBA2,
}
"""Engine arguments of each family. A step is four blocks, so that some boundaries are inside a step.

A state is twice as large on a CPU with AVX512-BF16, where vLLM stores it in float32, and must fit into a block on every
CPU.
"""


def family() -> Family:
    """The model family of this target."""
    [found] = (each for each in FAMILIES if each.name == MODEL)
    return found


def workloads() -> Workloads:
    return Workloads((family().arguments | ARGUMENTS[MODEL])["block_size"])


def offload_config(**extra: Any) -> dict[str, Any]:
    """HybridOffloadConnector with enough room for all tests.

    With so slow an engine, additional steps are cheap relative to tokens. So the tests show where states are stored,
    not whether they pay off for such short prompts.
    """
    tiers = [{"type": "ram", "capacity": "512MiB"}]
    config: dict[str, Any] = {"tiers": tiers, "compute_tokens_per_second": 200, **extra}
    return trials.KV_TRANSFER_CONFIG | {"kv_connector_extra_config": config}


def engine_arguments() -> dict[str, Any]:
    return ARGUMENTS[MODEL] | {"async_scheduling": IS_ASYNCHRONOUS}


@contextlib.contextmanager
def running(directory: Path, **arguments: Any) -> Iterator[Trial]:
    """An engine with HybridOffloadConnector in its default configuration, with an audit."""
    with contextlib.ExitStack() as stack:
        if IS_ASYNCHRONOUS:
            stack.enter_context(asynchronous_scheduling())
        options = engine_arguments() | arguments
        trial = stack.enter_context(
            trials.running(family(), directory, kv_transfer_config=offload_config(), arguments=options)
        )
        assert trial.engine.core.async_scheduling is IS_ASYNCHRONOUS
        taken = trial.engine.scheduler.vllm_config.cache_config.block_size
        assert taken == workloads().block_tokens, "vLLM changed the block size"
        yield trial


@contextlib.contextmanager
def running_beside(directory: Path, kv_transfer_config: Mapping[str, Any]) -> Iterator[Engine]:
    """The same engine with another connector, or with another configuration of ours."""
    with contextlib.ExitStack() as stack:
        if IS_ASYNCHRONOUS:
            stack.enter_context(asynchronous_scheduling())
        engine, _ = stack.enter_context(
            trials.running_engine(family(), directory, kv_transfer_config, engine_arguments())
        )
        yield engine


Between = Callable[[], None]
"""Called between two requests, when the engine is idle."""


def in_turn(
    engine: Engine, prompts: Sequence[Sequence[int]], between: Between, *, guesses: bool = False
) -> list[Result]:
    """Run each prompt alone, and call `between` before each but the first."""
    results: list[Result] = []
    for prompt in prompts:
        if results:
            between()
        if not guesses:
            trials.expect_no_partings(engine)
        results += engine.generate([prompt])
    return results


@dataclass(frozen=True, slots=True)
class Chat:
    """The prompts and results of a chat, by turn."""

    prompts: list[Tokens] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def ends(self) -> list[int]:
        """The number of tokens of each prompt and its answer."""
        return [len(p) + len(r.token_ids) for p, r in zip(self.prompts, self.results, strict=True)]


def chat(engine: Engine, words: Workloads, between: Between, *, seed: int = 0) -> Chat:
    """A chat in which every prompt is the last prompt, its answer and more tokens."""
    so_far = Chat()
    prompt = words.first_message(seed=seed)
    for turn in range(CHAT_TURNS):
        if turn:
            between()
        trials.expect_no_partings(engine)
        num_tokens = words.answer_tokens(turn, len(prompt))
        so_far.prompts.append(prompt)
        so_far.results.extend(engine.generate([prompt], max_tokens=num_tokens))
        prompt = words.next_turn(prompt, so_far.results[-1].token_ids, seed=10 * seed + turn)
    return so_far


# States of other positions, for the controls.

GroupBytes = Mapping[int, bytes]
"""The states of each recurrent group, all layers concatenated."""


def state_after(trial: Trial, tokens: Sequence[int]) -> GroupBytes:
    """The states of the recurrent layers after exactly these tokens, even within a block. Nothing is stored."""
    engine = trial.engine
    request_id = engine.add(tokens, max_tokens=2)
    while not engine.step() and sum(step.num_tokens for step in engine._steps.get(request_id, [])) < len(tokens):
        pass
    tables = engine.block_ids(request_id)
    groups = engine.kv_cache_config.kv_cache_groups
    states = {
        group: b"".join(engine.page(layer, tables[group][-1]).numpy().tobytes() for layer in groups[group].layer_names)
        for group in recurrent_groups(trial)
    }
    engine.abort(request_id)
    trial.forget()
    return states


def recurrent_groups(trial: Trial) -> list[int]:
    return [i for i, group in enumerate(trial.spec.groups) if group.kind is GroupKind.RECURRENT]


def restored_states(trial: Trial) -> dict[int, bytes]:
    """The key of the last restored state of each recurrent group."""
    keys = dict(trial.audit.restored_keys)
    return {group: keys[group] for group in recurrent_groups(trial)}


def replace_states(trial: Trial, keys: Mapping[int, bytes], states: GroupBytes) -> None:
    """Replace the stored states of these keys, with correct checksums."""
    for group, key in keys.items():
        views = list(stored_views(trial.engine, key))
        assert sum(len(view) for view in views) == len(states[group])
        rest = memoryview(states[group])
        for view in stored_views(trial.engine, key):
            view[:], rest = rest[: len(view)], rest[len(view) :]


class Rows:
    """The tokens that each connector restored for the same workloads."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, list[int]]] = {}

    def add(self, workload: str, who: str, results: Sequence[Result]) -> None:
        self.of.setdefault(workload, {})[who] = [result.num_cached_tokens for result in results]

    def write(self, path: Path) -> None:
        told = {"model": MODEL, "asynchronous": IS_ASYNCHRONOUS, "restored_tokens": self.of}
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
