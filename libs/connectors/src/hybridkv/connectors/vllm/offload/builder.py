"""Builder of the scheduler's half: checks the settings, then opens the tiers.

Host memory alone opens at once, because no stored byte outlives the engine, and no other process uses the keys. With
secondary tiers, the tiers open after all workers have reported the facts that only they have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hybridkv.connectors.config import OffloadConfig, decode_config
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import suspect_groups
from hybridkv.connectors.vllm.common.identity.identification import IdentityBuilder
from hybridkv.connectors.vllm.common.layout import CacheLayout, resolve_layout
from hybridkv.connectors.vllm.common.prefill_stops import PrefillStops
from hybridkv.connectors.vllm.common.role import role_of
from hybridkv.connectors.vllm.common.specs.resumable import require_resumable
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload import tiers
from hybridkv.connectors.vllm.offload.checkpoints import STEP_S, CheckpointOptions, Checkpoints, has_states
from hybridkv.connectors.vllm.offload.loads.load_planner import Deadlines
from hybridkv.connectors.vllm.offload.loads.prefill_speed import FIRST_TOKENS_PER_S
from hybridkv.connectors.vllm.offload.scheduler import OffloadScheduler
from hybridkv.connectors.vllm.offload.startup_log import log_startup
from hybridkv.connectors.vllm.offload.tiers import ArenaSizes
from hybridkv.planner import LoadAdmission
from hybridkv.tiers.stack import TierStack

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class CheckedSettings(NamedTuple):
    """Checked settings of one engine.

    Args:
        config: configuration of the connector.
        layout: layout of the engine's groups.
        sizes: sizes of host memory.
    """

    config: OffloadConfig
    layout: CacheLayout
    sizes: ArenaSizes


def check_settings(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CheckedSettings:
    """Checks the settings and the engine, in both halves of the connector. Opens nothing.

    Args:
        vllm_config: final configuration of vLLM.
        kv_cache_config: KV cache configuration, in either half.

    Raises:
        ConfigurationError: the configuration or the model is not supported.
    """
    config = decode_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
    require_resumable(vllm_config, kv_cache_config, is_excepted=config.without_prefix_caching)
    layout = resolve_layout(vllm_config, kv_cache_config, config.chunk_tokens, with_tails=True)
    tiers.require_own_directory(config, vllm_config)
    return CheckedSettings(config, layout, tiers.arena_sizes(config, layout))


@dataclass(frozen=True, slots=True)
class BuilderInputs:
    """Inputs of the builder that are known when the connector is constructed.

    Args:
        vllm_config: final configuration of vLLM.
        config: configuration of the connector.
        layout: layout of the engine's groups.
        sizes: sizes of host memory.
        admission: admission of loads.
        metrics: the connector's metrics.
        shared_prefill_stops: prefill stops of all children of HybridMultiConnector; None without it, and for a model
            without recurrent states.
    """

    vllm_config: VllmConfig
    config: OffloadConfig
    layout: CacheLayout
    sizes: ArenaSizes
    admission: LoadAdmission
    metrics: ConnectorMetrics
    shared_prefill_stops: PrefillStops | None = None


class OffloadBuilder:
    """Builder of the scheduler's half.

    Args:
        inputs: inputs that are known from the start.

    Raises:
        ConfigurationError: a fact of the engine cannot be read.
    """

    def __init__(self, inputs: BuilderInputs) -> None:
        self._inputs = inputs
        self._identification = IdentityBuilder(
            inputs.vllm_config,
            inputs.config,
            inputs.layout,
            "HybridOffloadConnector",
            is_shared=bool(inputs.config.secondary),
        )

    @property
    def needs_no_worker(self) -> bool:
        """True if the tiers can open without facts of the workers, because no stored byte outlives the engine."""
        return self._identification.needs_no_worker

    @property
    def num_ranks(self) -> int:
        """Number of workers that must report their facts."""
        return self._identification.num_ranks

    def build(self, ranks: Mapping[int, Mapping[str, str]]) -> OffloadScheduler:
        """Opens the tiers and builds the scheduler's half.

        Args:
            ranks: facts of each worker, by rank.

        Raises:
            ConfigurationError: a tier cannot be opened, or `identity_ignores` has an unknown name.
        """
        inputs = self._inputs
        identity = self._identification.identity(ranks)
        fingerprint = identity.keys.fingerprint
        stack = tiers.build_stack(inputs.config, inputs.layout, fingerprint, inputs.sizes)
        scheduler = OffloadScheduler(
            inputs.layout,
            identity,
            stack,
            inputs.admission,
            Deadlines(
                inputs.config.pending_timeout_seconds,
                inputs.config.load_timeout_seconds,
                tiers.clock,
                inputs.config.compute_tokens_per_second,
            ),
            inputs.metrics,
            dataclasses.replace(
                role_of(inputs.vllm_config.kv_transfer_config),
                copies_locally=inputs.config.local_copies and not compat.hashes_before_computing(inputs.vllm_config),
            ),
        )
        if inputs.config.checkpoints != "off" and has_states(inputs.layout):
            scheduler.bind_checkpoints(self._checkpoints(stack))
        scheduler.set_suspect_groups(suspect_groups("HybridOffloadConnector", inputs.vllm_config, inputs.layout))
        scheduler.set_keep_share(inputs.config.keep_share)
        if inputs.config.peer is not None:
            scheduler.allow_hinted_peers(tiers.hinted_peers(inputs.config.peer))
        log_startup(inputs.vllm_config, inputs.config, inputs.layout, fingerprint)
        return scheduler

    def _checkpoints(self, stack: TierStack) -> Checkpoints:
        inputs, config = self._inputs, self._inputs.config
        options = CheckpointOptions(
            max_stops=config.checkpoint_stops,
            has_answers=config.checkpoint_answers and not compat.uses_speculative_decoding(inputs.vllm_config),
            step_tokens=max(1, round(STEP_S * (config.compute_tokens_per_second or FIRST_TOKENS_PER_S))),
            cut_tokens=compat.prefill_cut_tokens(inputs.vllm_config),
            has_drafts=compat.uses_speculative_decoding(inputs.vllm_config),
        )
        return Checkpoints(
            inputs.layout,
            stack,
            [name for name, tier in config.secondary.items() if tier.cascade == "all"],
            options,
            inputs.shared_prefill_stops or PrefillStops(compat.max_chunk_tokens(inputs.vllm_config)),
            inputs.metrics,
            is_alone=inputs.shared_prefill_stops is None,
        )
