"""Restores the cache of a hybrid model: runs prompts cold, drops the engine's cache, and runs the prompts warm.

Starts vLLM in this process on a tiny random model (or any model you name) with HybridOffloadConnector, and compares
every warm answer with its cold one: the same tokens, the same log-probabilities. Exits with 1 if anything differs, or
if nothing was restored for a prompt. Progress goes to stderr, the result to stdout. The time to first token is measured
once for each answer; it is no benchmark (see bench/).
"""

import dataclasses
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import torch
from rich.console import Console
from rich.table import Table

import tiny_models

_PROGRESS: Final = Console(stderr=True, highlight=False)
_WARM_UP_SEED: Final = -1
_DRAIN_DEADLINE_S: Final = 60.0
_LOGPROBS: Final = 5
_CHUNK_TOKENS: Final = 128  # a multiple of every tiny model's blocks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line."""

    model: str
    num_prompts: int
    prompt_tokens: int
    max_tokens: int
    load: str
    capacity: str
    tolerance: float
    as_json: bool
    verbose: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Result of one request, and its time to first token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    num_cached_tokens: int
    first_token_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of one prompt, cold and warm: a row of the result."""

    prompt_tokens: int
    restored_tokens: int
    restored_tokens_by_tier: dict[str, int]
    cold_first_token_ms: float
    warm_first_token_ms: float
    tokens_equal: bool
    logprobs_equal: bool

    @property
    def ok(self) -> bool:
        return self.tokens_equal and self.logprobs_equal and self.restored_tokens > 0


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    default="qwen3-next",
    show_default=True,
    help=f"One of {', '.join(tiny_models.KINDS)}, or a model's path.",
)
@click.option("--prompts", "num_prompts", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--prompt-tokens", default=2000, show_default=True, type=click.IntRange(min=2))
@click.option("--max-tokens", default=16, show_default=True, type=click.IntRange(min=1))
@click.option("--load", default="async", show_default=True, type=click.Choice(["async", "sync"]))
@click.option("--capacity", default="1GiB", show_default=True, help="Host memory for the cache.")
@click.option("--tolerance", default=0.0, show_default=True, help="Largest difference of log-probabilities to accept.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--verbose", is_flag=True, help="Show vLLM's own log.")
def main(**values: Any) -> None:
    options = Options(**values)
    is_tiny = options.model in tiny_models.KINDS
    _prepare_environment(options.verbose, is_tiny)
    transfer_config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": [{"type": "ram", "capacity": options.capacity}],
            "chunk_tokens": _CHUNK_TOKENS if is_tiny else "auto",
            "load": options.load,
        },
    }
    with tempfile.TemporaryDirectory(prefix="hybridkv-quickstart-") as scratch:
        path, arguments = _model_and_arguments(options.model, Path(scratch), options.prompt_tokens)
        _PROGRESS.print(f"starting vLLM on {options.model} ...")
        started = time.monotonic()
        engine = _start_engine(path, arguments | {"kv_transfer_config": transfer_config}, options.verbose)
        _PROGRESS.print(f"ready after {time.monotonic() - started:.0f} s")
        try:
            comparisons = _compare(engine, options)
        finally:
            engine.engine_core.shutdown()

    ok = all(comparison.ok for comparison in comparisons)
    if options.as_json:
        rows = [dataclasses.asdict(comparison) for comparison in comparisons]
        print(json.dumps({"model": options.model, "load": options.load, "ok": ok, "prompts": rows}, indent=2))
    else:
        Console().print(_table(options.model, comparisons))
    if not ok:
        _PROGRESS.print(f"[red]error:[/red] {_failure(comparisons)}")
        sys.exit(1)
    _PROGRESS.print("every warm answer equals its cold answer")


def _prepare_environment(verbose: bool, is_tiny: bool) -> None:
    """Sets environment variables and torch's threads, before vLLM is imported. Keeps variables that are already set."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in this process
        "VLLM_LOGGING_LEVEL": "INFO" if verbose else "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TORCH_CPP_LOG_LEVEL": "INFO" if verbose else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # no compiler is needed and the first forward does not take ten seconds
    }
    if is_tiny:
        # Too small for two threads, which wait for each other whenever a core is taken away.
        settings |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # torch read that variable when it was imported
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if not verbose:
        warnings.simplefilter("ignore")
    # If the first forward pass of a bf16 engine is a single token, it uses AMX before the process has permission from
    # the kernel. This call requests the permission.
    torch.cpu._init_amx()


def _model_and_arguments(model: str, scratch: Path, prompt_tokens: int) -> tuple[Path, dict[str, Any]]:
    """The model's directory, and engine arguments. With those of a tiny model, cold and warm answers are equal to the
    last digit. Writes a tiny model to `scratch`."""
    if model not in tiny_models.KINDS:
        if not Path(model).is_dir():
            raise click.BadParameter(f"{model!r} is neither a directory nor one of {', '.join(tiny_models.KINDS)}")
        return Path(model), {"enable_prefix_caching": True, "enforce_eager": True}
    arguments = dict(tiny_models.ENGINE_ARGUMENTS[model])
    # The last step of a cold prefill should compute just the tokens that a hit leaves to compute, because another
    # number of tokens rounds otherwise. So let a step end at the last boundary where a hit can end.
    arguments["max_num_batched_tokens"] = max((prompt_tokens - 1) // _CHUNK_TOKENS, 1) * _CHUNK_TOKENS
    return tiny_models.make_tiny_model(model, scratch / model), arguments


def _start_engine(path: Path, arguments: dict[str, Any], verbose: bool) -> Any:
    from vllm import LLM

    return LLM(str(path), use_tqdm_on_load=verbose, **arguments).llm_engine


def _compare(engine: Any, options: Options) -> list[Comparison]:
    """Runs every prompt cold, drops the engine's own cache, and runs every prompt again."""
    vocabulary_size = engine.model_config.get_vocab_size()
    prompts = [_random_prompt(options.prompt_tokens, vocabulary_size, seed) for seed in range(options.num_prompts)]
    _PROGRESS.print("warming the engine up, so that no time below includes first-use work")
    for _ in range(2):  # a full prefill, then a short one after a hit
        _answer(engine, _random_prompt(options.prompt_tokens, vocabulary_size, _WARM_UP_SEED), options.max_tokens)
    _reset_engine_cache(engine)

    cold = []
    for number, prompt in enumerate(prompts, start=1):
        _PROGRESS.print(f"cold {number}/{options.num_prompts}")
        cold.append(_answer(engine, prompt, options.max_tokens))
    _reset_engine_cache(engine)
    _PROGRESS.print("the engine's own cache is empty now")
    warm = []
    for number, prompt in enumerate(prompts, start=1):
        _PROGRESS.print(f"warm {number}/{options.num_prompts}")
        warm.append(_answer(engine, prompt, options.max_tokens))
    return [_comparison(options.prompt_tokens, *pair, options.tolerance) for pair in zip(cold, warm, strict=True)]


def _random_prompt(num_tokens: int, vocabulary_size: int, seed: int) -> list[int]:
    generator = random.Random(f"prompt {seed}")
    return [generator.randrange(tiny_models.PAD_ID + 1, vocabulary_size) for _ in range(num_tokens)]


def _answer(engine: Any, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Runs one greedy request to its end."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=_LOGPROBS, ignore_eos=True)
    started = time.perf_counter()
    engine.add_request(f"quickstart-{started}", {"prompt_token_ids": list(prompt)}, parameters)
    first_token_s = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if first_token_s is None and output.outputs[0].token_ids:
                first_token_s = time.perf_counter() - started
            if output.finished:
                completion = output.outputs[0]
                result = Answer(
                    token_ids=tuple(completion.token_ids),
                    logprobs=tuple({i: entry.logprob for i, entry in step.items()} for step in completion.logprobs),
                    num_cached_tokens=output.num_cached_tokens or 0,
                    first_token_s=first_token_s or 0.0,
                )
    return result


def _reset_engine_cache(engine: Any) -> None:
    """Waits until the connector has ended its stores, then drops the engine's cached blocks. The connector keeps its
    chunks."""
    deadline = time.monotonic() + _DRAIN_DEADLINE_S
    while engine.engine_core.engine_core.scheduler.has_requests():
        engine.step()
        if time.monotonic() > deadline:
            raise TimeoutError("the connector did not finish its stores")
    if not engine.reset_prefix_cache(reset_connector=False):
        raise RuntimeError("vLLM could not reset its prefix cache: some blocks are still in use")


def _comparison(prompt_tokens: int, cold: Answer, warm: Answer, tolerance: float) -> Comparison:
    return Comparison(
        prompt_tokens=prompt_tokens,
        restored_tokens=warm.num_cached_tokens,
        restored_tokens_by_tier=_tokens_by_tier(warm.num_cached_tokens),
        cold_first_token_ms=cold.first_token_s * 1e3,
        warm_first_token_ms=warm.first_token_s * 1e3,
        tokens_equal=cold.token_ids == warm.token_ids,
        logprobs_equal=_logprobs_equal(cold, warm, tolerance),
    )


def _tokens_by_tier(restored_tokens: int) -> dict[str, int]:
    """Restored tokens by tier. The quickstart configures only host memory."""
    return {"ram": restored_tokens} if restored_tokens else {}


def _logprobs_equal(cold: Answer, warm: Answer, tolerance: float) -> bool:
    if tolerance == 0.0:
        return cold.logprobs == warm.logprobs
    return len(cold.logprobs) == len(warm.logprobs) and all(
        token in after and abs(before[token] - after[token]) <= tolerance
        for before, after, token in zip(cold.logprobs, warm.logprobs, cold.token_ids, strict=True)
    )


def _table(model: str, comparisons: Sequence[Comparison]) -> Table:
    table = Table(title=f"{model}: cold, then warm after the engine lost its cache")
    for heading in ("prompt tokens", "tokens restored", "by tier", "first token cold, ms", "first token warm, ms"):
        table.add_column(heading, justify="right")
    for heading in ("tokens equal", "logprobs equal"):
        table.add_column(heading, justify="center")
    for row in comparisons:
        table.add_row(
            str(row.prompt_tokens),
            str(row.restored_tokens),
            ", ".join(f"{tier} {tokens}" for tier, tokens in row.restored_tokens_by_tier.items()) or "-",
            f"{row.cold_first_token_ms:.1f}",
            f"{row.warm_first_token_ms:.1f}",
            _yes(row.tokens_equal),
            _yes(row.logprobs_equal),
        )
    return table


def _yes(value: bool) -> str:
    return "[green]yes[/green]" if value else "[red]NO[/red]"


def _failure(comparisons: Sequence[Comparison]) -> str:
    if not all(row.tokens_equal for row in comparisons):
        return "warm tokens differ from cold tokens"
    if not all(row.logprobs_equal for row in comparisons):
        return "warm log-probabilities differ from cold ones (hint: --tolerance, if only the last digits do)"
    return "nothing was restored for at least one prompt (hint: more --prompt-tokens, or more --capacity)"


if __name__ == "__main__":
    main()
