"""One real vLLM engine inside the test process, small enough to start for a test module and open to inspection.

The engine runs uniproc: the scheduler, the worker, both halves of the connector and the KV tensors are plain objects
here. A test may step it by hand, abort, corrupt a page and compare log-probabilities to the last digit.

Nothing here imports vLLM at module level, because the environment must be prepared first. The harness knows no
connector: it is named by ``kv_transfer_config``. vLLM keeps process-wide state; run one engine at a time.

When is "cold" bit-equal to "warm"? When both compute the tokens after the hit in the same steps, beside the same other
requests: ``Result.steps`` says so. With the arguments of ``tiny_models.ENGINE_ARGUMENTS`` requests that run one after
the other always do.
"""

import contextlib
import dataclasses
import gc
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import patience

# Before torch, which asks once, when it is loaded. These models are too small for two threads: they wait for each other
# at every layer, and wherever a core is taken away a step takes as long as the scheduler's slice.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

import tiny_models

SAME_STEPS: Final[dict[str, Any]] = {"checkpoints": "off"}
"""Of HybridOffloadConnector, where two runs of a prompt are compared to the last digit. Else a prompt stops where all
requests before it have made that worth its price, which a machine's speed decides too."""
_DRAIN_DEADLINE_S: Final = patience.seconds(30.0)
_IDLE_DEADLINE_S: Final = patience.seconds(30.0)
"""Nothing has been computed for so long."""
_PAUSE_S: Final = 0.001
_LONGEST_STEP: Final = 256  # so that short prompts have several steps, and a recurrent layer several states
_PROMPT_STRIDE: Final = {"qwen3-next": _LONGEST_STEP, "gemma3": 512, "gpt-oss": 512}
"""Whole steps, and more than a sliding window. A recurrent model's tokens are the dear ones on a CPU."""


def record_engine_start() -> None:
    """Add a line to the test's outputs. ``tools/suite_cost.py`` counts these lines."""
    if outputs := os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR"):
        with (Path(outputs) / "engine_starts").open("a") as lines:
            lines.write(f"{os.getpid()}\n")


def prepare_environment(directory: Path) -> None:
    """Keep every cache of the engine under ``directory`` and every request off the network. Call before vLLM loads."""
    for variable, name in (
        ("HOME", "home"),
        ("XDG_CACHE_HOME", "cache"),
        ("XDG_CONFIG_HOME", "config"),
        ("HF_HOME", "huggingface"),
        ("VLLM_CONFIG_ROOT", "vllm_config"),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
        ("TRITON_CACHE_DIR", "triton"),
    ):
        path = directory / name
        path.mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(path)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # No compiler is needed, and the first forward takes milliseconds where compiling takes ten seconds.
        "TORCHDYNAMO_DISABLE": "1",
    }
    # What vLLM starts must find the same packages as this process.
    os.environ.setdefault("VLLM_CACHE_ROOT", str(directory / "vllm"))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def make_prompt(num_tokens: int, *, seed: int, prefix: Sequence[int] = ()) -> list[int]:
    """A prompt of exactly ``num_tokens`` token ids: ``prefix``, then random tokens that depend on ``seed`` only."""
    generator = random.Random(seed)
    tail = [generator.randrange(tiny_models.PAD_ID + 1, tiny_models.VOCABULARY_SIZE) for _ in range(num_tokens)]
    return [*prefix, *tail][:num_tokens]


def exact_prompt_lengths(kind: str, count: int, *, remainder: int = 40) -> list[int]:
    """Lengths of prompts whose end alone, ``remainder`` tokens in [1, block_size], is left to compute after a hit.

    The rest are whole steps, and more tokens than a sliding window has.
    """
    block_size = tiny_models.ENGINE_ARGUMENTS[kind]["block_size"]
    if not 1 <= remainder <= block_size:
        raise ValueError(f"remainder {remainder}: expected 1 to {block_size}")
    return [_PROMPT_STRIDE[kind] * (i + 1) + remainder for i in range(count)]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A request's part in one forward pass, and what was computed beside it, which decides how sums are rounded."""

    first_token: int
    num_tokens: int
    place: int  # among the requests of the step
    batch: tuple[tuple[int, int], ...]  # first token and number of tokens of each of them


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What one request gave: compare two with ``==`` on ``token_ids`` and ``logprobs``."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]  # per output token: the top few token ids and their exact floats
    num_cached_tokens: int  # tokens of the prompt that were not computed: the engine's own hit plus the connector's
    finish_reason: str | None
    steps: tuple[Step, ...] = ()  # each one that computed tokens of this request
    kv_transfer_params: dict[str, Any] | None = None  # what the connector says of it to another engine's

    def same_output(self, other: "Result") -> bool:
        """Equal tokens and log-probabilities, to the last digit."""
        return self.token_ids == other.token_ids and self.logprobs == other.logprobs

    def part(self, start: int, count: int) -> "Result":
        """Some tokens of the answer and their log-probabilities."""
        end = start + count
        return dataclasses.replace(
            self, token_ids=self.token_ids[start:end], logprobs=self.logprobs[start:end], steps=()
        )

    def as_json(self) -> dict[str, Any]:
        """What survives being written down, to the last digit."""
        return {
            "tokens": self.token_ids,
            "logprobs": [{str(token): value.hex() for token, value in step.items()} for step in self.logprobs],
            "cached": self.num_cached_tokens,
            "steps": [dataclasses.astuple(step) for step in self.steps],
        }

    @staticmethod
    def from_json(written: Mapping[str, Any]) -> "Result":
        logprobs = ({int(token): float.fromhex(value) for token, value in step.items()} for step in written["logprobs"])
        steps = (Step(*rest, tuple((first, count) for first, count in batch)) for *rest, batch in written["steps"])
        return Result("", tuple(written["tokens"]), tuple(logprobs), written["cached"], None, tuple(steps))


class Engine:
    """A running engine. Get one from ``running_engine``."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.has_computed = True
        """In its last step. One that did not is a pause in vLLM's own loop."""
        self._next_request = 0
        self._finished: dict[str, Result] = {}
        self._steps: dict[str, list[Step]] = {}
        self._record_schedule()
        record_engine_start()

    # --- running requests -------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8) -> list[Result]:
        """Run ``prompts`` together, drain, and return the results in the order of the prompts."""
        request_ids = [self.add(prompt, max_tokens=max_tokens) for prompt in prompts]
        self.run()
        self.drain()
        return [self.result(request_id) for request_id in request_ids]

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        request_id: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> str:
        """Queue one greedy request, without stepping. Returns the id that ``result`` and ``abort`` take."""
        from vllm import SamplingParams

        self._next_request += 1
        request_id = request_id or f"request-{self._next_request}"
        extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params is not None else None
        parameters = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, logprobs=5, ignore_eos=True, extra_args=extra
        )
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, parameters)
        return request_id

    def step(self) -> list[Result]:
        """One engine step, also when no request is left. Returns the requests that finished in it."""
        finished = [
            _result(output, self._steps.pop(output.request_id, []))
            for output in self.llm.llm_engine.step()
            if output.finished
        ]
        self._finished.update((result.request_id, result) for result in finished)
        return finished

    def run(self) -> None:
        """Step until no request is waiting or running.

        As vLLM's own loop it pauses after a step that computed nothing: what requests wait for needs the processor, and
        some waits are bounded in steps.
        """
        progress_s = time.monotonic()
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()
            if self.has_computed:
                progress_s = time.monotonic()
            elif time.monotonic() - progress_s > _IDLE_DEADLINE_S:
                raise TimeoutError(f"nothing was computed for {_IDLE_DEADLINE_S:.0f} s, and requests are unfinished")
            else:
                time.sleep(_PAUSE_S)

    def drain(self) -> None:
        """Step on after the last request until the connector has released every block and holds no pending work."""
        deadline = time.monotonic() + _DRAIN_DEADLINE_S
        while self.scheduler.has_requests():
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the connector still holds {sorted(self.scheduler.requests)} after draining")

    def abort(self, *request_ids: str) -> None:
        """Abort requests. An aborted request has no result."""
        self.llm.llm_engine.abort_request(list(request_ids))
        for request_id in request_ids:
            self._steps.pop(request_id, None)

    def result(self, request_id: str) -> Result:
        """The result of a finished request; each can be taken once. KeyError when unknown, unfinished or aborted."""
        return self._finished.pop(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget the engine's own cached blocks. The connector keeps what it stored."""
        self.drain()
        if not self.llm.llm_engine.reset_prefix_cache(reset_connector=False):
            raise RuntimeError("the prefix cache was not reset: some blocks are still in use")

    # --- inspection -------------------------------------------------------------------------------------------------

    @property
    def core(self) -> Any:
        """vLLM's EngineCore."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's half of the connector, or None."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The worker's half of the connector; fails when the engine runs without one."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def model_runner(self) -> Any:
        worker = self.core.model_executor.driver_worker
        return getattr(worker, "worker", worker).model_runner

    @property
    def kv_cache_config(self) -> Any:
        return self.scheduler.kv_cache_config

    @property
    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def counters(self) -> dict[str, float]:
        """Series of the engine's /metrics: name and labels besides the engine's own, to value.

        Needs ``disable_log_stats=False``.
        """
        from vllm.v1.metrics.reader import Counter, Gauge

        series = {}
        for metric in self.llm.get_metrics():
            if isinstance(metric, Counter | Gauge):
                labels = [f"{k}={v}" for k, v in sorted(metric.labels.items()) if k not in ("engine", "model_name")]
                series[",".join([metric.name, *labels])] = float(metric.value)
        return series

    def page(self, layer_name: str, block_id: int) -> torch.Tensor:
        """The bytes of one layer in one block, without padding: a writable uint8 view of the engine's memory."""
        group = next(g for g in self.kv_cache_config.kv_cache_groups if layer_name in g.layer_names)
        placement = next(t for t in self.kv_cache_config.kv_cache_tensors if layer_name in t.layers)
        spec = group.kv_cache_spec
        num_bytes = dataclasses.replace(spec, page_size_padded=None).page_size_bytes
        start = placement.offset + placement.layers.index(layer_name) * placement.layer_stride
        start += block_id * placement.block_stride
        memory = torch.empty(0, dtype=torch.uint8).set_(self._kv_storage())
        return memory[start : start + num_bytes]

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The block table of an unfinished request, one list a group; 0 is the null block. Takes the id of ``add``."""
        internal = next(name for name in self.scheduler.requests if name.rpartition("-")[0] == request_id)
        return tuple(list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(internal))

    def status(self, request_id: str) -> str | None:
        """How far a request is, in the scheduler's words; None where it is none of its. Takes the id of ``add``."""
        found = (request for name, request in self.scheduler.requests.items() if name.rpartition("-")[0] == request_id)
        return next((request.status.name for request in found), None)

    def _record_schedule(self) -> None:
        schedule = self.scheduler.schedule

        def recording(*arguments: Any) -> Any:
            output = schedule(*arguments)
            self.has_computed = output.total_num_scheduled_tokens > 0
            old = output.scheduled_cached_reqs
            first_tokens = dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
            first_tokens |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            parts = {name: (first_tokens[name], count) for name, count in output.num_scheduled_tokens.items()}
            for place, (name, part) in enumerate(parts.items()):
                step = Step(*part, place, tuple(parts.values()))
                self._steps.setdefault(name.rpartition("-")[0], []).append(step)
            return output

        self.scheduler.schedule = recording

    def _kv_storage(self) -> torch.UntypedStorage:
        """The one allocation that all layers share."""
        cache = self.model_runner.kv_caches[0]
        while not isinstance(cache, torch.Tensor):
            cache = cache[0]
        return cache.untyped_storage()


def _result(output: Any, steps: Sequence[Step]) -> Result:
    completion = output.outputs[0]
    logprobs = tuple({token: entry.logprob for token, entry in step.items()} for step in completion.logprobs or ())
    return Result(
        request_id=output.request_id,
        token_ids=tuple(completion.token_ids),
        logprobs=logprobs,
        num_cached_tokens=output.num_cached_tokens or 0,
        finish_reason=completion.finish_reason,
        steps=tuple(steps),
        kv_transfer_params=output.kv_transfer_params,
    )


def inspect_model_here(*architectures: str) -> None:
    """Spare the fifteen seconds in which vLLM inspects a model's class in a subprocess: hand it the class, imported."""
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in architectures:
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


@contextlib.contextmanager
def running_engine(
    kind: str,
    directory: Path,
    *,
    kv_transfer_config: dict[str, Any] | None = None,
    weights_seed: int = 0,
    **arguments: Any,
) -> Iterator[Engine]:
    """Make the tiny model of ``kind`` under ``directory`` and run an engine on it until the block ends.

    Another ``weights_seed`` is another training of the same model. ``arguments`` override
    ``tiny_models.ENGINE_ARGUMENTS``. Use it in a module-scoped fixture.
    """
    if torch.get_num_threads() != 1:
        raise RuntimeError("torch was loaded before this module and runs on several threads: import harness first")
    prepare_environment(directory / "environment")
    model = tiny_models.make_tiny_model(kind, directory / kind, seed=weights_seed)
    options = tiny_models.ENGINE_ARGUMENTS[kind]
    options = options | {"max_num_batched_tokens": min(options["max_num_batched_tokens"], _LONGEST_STEP)} | arguments
    if kv_transfer_config is not None:
        options["kv_transfer_config"] = kv_transfer_config
    with running_model(model, options) as engine:
        yield engine


@contextlib.contextmanager
def running_model(model: Path, options: dict[str, Any]) -> Iterator[Engine]:
    """Run an engine on the model in a directory until the block ends. Call ``prepare_environment`` before."""
    # A bf16 engine whose very first forward is a single token meets AMX instructions that nobody asked the kernel for.
    torch.cpu._init_amx()

    gc.collect()  # what an engine before this one has left
    # Importing vLLM makes a million objects that stay: the collector would look at them again and again.
    gc.disable()
    from vllm import LLM

    gc.freeze()
    gc.enable()
    inspect_model_here(*json.loads((model / "config.json").read_text())["architectures"])
    llm = LLM(str(model), **options)
    try:
        yield Engine(llm)
    finally:
        # On its way out vLLM looks for garbage twice, a second each, in processes that end now or collect it above.
        with mock.patch.object(gc, "collect"):
            llm.llm_engine.engine_core.shutdown()


def scratch_directory(default: Path) -> Path:
    """Where an engine may write: Bazel's TEST_TMPDIR when set, else ``default`` (pytest's tmp_path)."""
    directory = os.environ.get("TEST_TMPDIR")
    return Path(directory) if directory else default
