"""One engine with one family's model and the connector, and its results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import harness
import mamba2_cpu
from audit import Audit
from families import Family
from harness import Engine, Result
from noise import Noise

from hybridkv.planner import CacheSpec
from hybridkv.planner.checkpoints import Experience
from hybridkv.planner.checkpoints.experience import DISTANCES

KV_TRANSFER_CONFIG: Final[dict[str, Any]] = {
    "kv_connector": "HybridOffloadConnector",
    "kv_connector_module_path": "hybridkv.connectors.vllm.offload.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"tiers": [{"type": "ram", "capacity": "128MiB"}], "load": "sync"},
}
"""Loads are copied at once, so that requests are in the same batches as with the engine's own hits."""


@dataclass(slots=True)
class Trial:
    """A running engine under watch."""

    family: Family
    engine: Engine
    audit: Audit
    noise: Noise
    saved_states: mamba2_cpu.SavedStates | None

    @property
    def spec(self) -> CacheSpec:
        """The groups and the chunk as the connector resolved them."""
        spec: CacheSpec = self.engine.connector._scheduler._layout.spec
        return spec

    def forget(self) -> None:
        """Empties the caches of the engine and the store."""
        self.engine.reset_prefix_cache()
        self.engine.connector.reset_cache()
        expect_no_partings(self.engine)
        self.audit.stored.clear()
        self.audit.forget()

    def lose_cache(self) -> None:
        """Empties the engine's cache. The store keeps its content and counts from zero."""
        self.engine.reset_prefix_cache()
        expect_no_partings(self.engine)
        self.audit.forget()

    @contextlib.contextmanager
    def for_one_test(self) -> Iterator[Trial]:
        """An engine without content from earlier tests, which must release all its blocks."""
        self.forget()
        num_free = self.engine.num_free_blocks
        yield self
        self.engine.reset_prefix_cache()
        assert self.engine.num_free_blocks == num_free, "the connector kept blocks of the engine"

    def one_by_one(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8) -> list[Result]:
        """Runs each prompt on its own."""
        return [self.engine.generate([prompt], max_tokens=max_tokens)[0] for prompt in prompts]


def hits(results: Sequence[Result]) -> list[int]:
    """Tokens of each prompt that were not computed."""
    return [result.num_cached_tokens for result in results]


@contextlib.contextmanager
def running(
    family: Family,
    directory: Path,
    *,
    kv_transfer_config: Mapping[str, Any] = KV_TRANSFER_CONFIG,
    arguments: Mapping[str, Any] | None = None,
) -> Iterator[Trial]:
    """Starts the family's engine with the connector, and ends it. `arguments` override the family's.

    Raises:
        ConfigurationError: the connector refuses the model.
    """
    with running_engine(family, directory, kv_transfer_config, arguments or {}) as (engine, saved):
        yield Trial(family, engine, Audit(engine).attach(), Noise(engine), saved)


@contextlib.contextmanager
def running_engine(
    family: Family, directory: Path, kv_transfer_config: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> Iterator[tuple[Engine, mamba2_cpu.SavedStates | None]]:
    """The same with any connector, or with none, and without a witness."""
    model = directory / family.name
    family.write(model)
    options = family.arguments | family.needs | dict(arguments)
    with running_with(family, model, kv_transfer_config, options) as running:
        yield running


@contextlib.contextmanager
def running_with(
    family: Family, model: Path, kv_transfer_config: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> Iterator[tuple[Engine, mamba2_cpu.SavedStates | None]]:
    """The same with a checkpoint that is written, and with these arguments alone."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    options = dict(arguments)
    if kv_transfer_config is not None:
        options["kv_transfer_config"] = dict(kv_transfer_config)
    with contextlib.ExitStack() as stack:
        # A start that is refused leaves vLLM's process groups behind.
        stack.callback(destroy_distributed_environment)
        stack.callback(destroy_model_parallel)
        saved = stack.enter_context(mamba2_cpu.checkpoints_in_plain_torch()) if family.needs_mamba2 else None
        yield stack.enter_context(harness.running_model(model, options)), saved


def expect_no_partings(engine: Engine) -> None:
    """The next prompt stops only where it parts from what is stored. Guesses would cut two runs of the same prompts in
    different places, for they depend on all requests before."""
    checkpoints = getattr(getattr(engine.connector, "_scheduler", None), "_checkpoints", None)
    if checkpoints is not None:
        checkpoints._experience = Experience(divergences=(0.0,) * len(DISTANCES))


@contextlib.contextmanager
def engine_keeps_every_state(engine: Engine) -> Iterator[None]:
    """Within it, the engine keeps in its own cache the state at every boundary that it computes, in answers too.

    As its `prefix_cache_retention_interval` of one block would have it from the start."""
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    usual = coordinator.retention_interval
    coordinator.retention_interval = None
    try:
        yield
    finally:
        coordinator.retention_interval = usual


def prepare(directory: Path) -> None:
    """Sets the environment of all engines of this process. Call it before vLLM is imported."""
    harness.prepare_environment(directory / "environment")
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"


def has_amx() -> bool:
    """What vLLM asks before it takes the kernels for latent attention that can resume a prefix."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())
