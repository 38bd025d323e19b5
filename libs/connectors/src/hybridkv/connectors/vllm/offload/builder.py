"""Builder of the scheduler's half: checks the settings, then opens the tiers.

Host memory alone opens at once, because no stored byte outlives the engine, and no other process uses the keys. With
secondary tiers, the tiers open after all workers have reported the facts that only they have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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


class OffloadBuilder:
    """Builder of the scheduler's half.

    Args:
        vllm_config: final configuration of vLLM.
        settings: checked settings of the engine.
        admission: admission of loads.
        metrics: the connector's metrics.
        shared_prefill_stops: prefill stops of all children of HybridMultiConnector; None without it, and for a model
            without recurrent states.

    Raises:
        ConfigurationError: a fact of the engine cannot be read.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        settings: CheckedSettings,
        admission: LoadAdmission,
        metrics: ConnectorMetrics,
        shared_prefill_stops: PrefillStops | None,
    ) -> None:
        self._vllm_config = vllm_config
        self._settings = settings
        self._admission = admission
        self._metrics = metrics
        self._shared_prefill_stops = shared_prefill_stops
        config, layout, _ = settings
        self._identification = IdentityBuilder(
            vllm_config, config, layout, "HybridOffloadConnector", is_shared=bool(config.secondary)
        )

    def build(self, ranks: Mapping[int, Mapping[str, str]]) -> OffloadScheduler:
        """Opens the tiers and builds the scheduler's half.

        Args:
            ranks: facts of each worker, by rank.

        Raises:
            ConfigurationError: a tier cannot be opened, or `identity_ignores` has an unknown name.
        """
        config, layout, sizes = self._settings
        identity = self._identification.identity(ranks)
        fingerprint = identity.keys.fingerprint
        stack = tiers.build_stack(config, layout, fingerprint, sizes)
        scheduler = OffloadScheduler(
            layout,
            identity,
            stack,
            self._admission,
            Deadlines(
                config.pending_timeout_seconds,
                config.load_timeout_seconds,
                tiers.clock,
                config.compute_tokens_per_second,
            ),
            self._metrics,
            dataclasses.replace(
                role_of(self._vllm_config.kv_transfer_config),
                copies_locally=config.local_copies and not compat.hashes_before_computing(self._vllm_config),
            ),
        )
        if config.checkpoints != "off" and has_states(layout):
            scheduler.bind_checkpoints(self._checkpoints(stack))
        scheduler.set_suspect_groups(suspect_groups("HybridOffloadConnector", self._vllm_config, layout))
        scheduler.set_keep_share(config.keep_share)
        if config.peer is not None:
            scheduler.allow_hinted_peers(tiers.hinted_peers(config.peer))
        log_startup(self._vllm_config, config, layout, fingerprint)
        return scheduler

    def _checkpoints(self, stack: TierStack) -> Checkpoints:
        config, layout, _ = self._settings
        options = CheckpointOptions(
            max_stops=config.checkpoint_stops,
            has_answers=config.checkpoint_answers and not compat.uses_speculative_decoding(self._vllm_config),
            step_tokens=max(1, round(STEP_S * (config.compute_tokens_per_second or FIRST_TOKENS_PER_S))),
            cut_tokens=compat.prefill_cut_tokens(self._vllm_config),
            has_drafts=compat.uses_speculative_decoding(self._vllm_config),
        )
        return Checkpoints(
            layout,
            stack,
            [name for name, tier in config.secondary.items() if tier.cascade == "all"],
            options,
            self._shared_prefill_stops or PrefillStops(compat.max_chunk_tokens(self._vllm_config)),
            self._metrics,
            is_alone=self._shared_prefill_stops is None,
        )
