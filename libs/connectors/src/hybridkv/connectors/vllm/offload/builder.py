"""Builder of the scheduler's half, from the facts about the content to an open store, and its lines in the log.

Host memory lives as long as the engine, so no other process reads its keys, and it opens at once. A store that outlives
the engine opens when the workers have reported the facts that they alone know.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.config import (
    DiskTierConfig,
    ObjectTierConfig,
    OffloadConfig,
    PeerTierConfig,
    SecondaryTierConfig,
    format_size,
)
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.corrupt_blocks import partly_copied_groups, suspect_groups
from hybridkv.connectors.vllm.common.identity.identification import IdentityBuilder
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.prefill_stops import PrefillStops
from hybridkv.connectors.vllm.common.role import role_of
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload import tiers
from hybridkv.connectors.vllm.offload.checkpoints import STEP_S, CheckpointOptions, Checkpoints, has_states
from hybridkv.connectors.vllm.offload.loads import Deadlines
from hybridkv.connectors.vllm.offload.prefill_speed import FIRST_TOKENS_PER_S
from hybridkv.connectors.vllm.offload.scheduler import OffloadScheduler
from hybridkv.connectors.vllm.offload.tiers import ArenaSizes
from hybridkv.hashing import Fingerprint
from hybridkv.planner import GroupKind, LoadAdmission
from hybridkv.tiers.stack import TierStack

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hybridkv")


def announce(vllm_config: VllmConfig, config: OffloadConfig, layout: CacheLayout, fingerprint: Fingerprint) -> None:
    """Logs the settings in one line, then special cases and warnings."""
    _log_settings(vllm_config, config, layout, fingerprint)
    _log_special_cases(vllm_config, layout)
    _warn(vllm_config, config)
    _warn_of_partial_copies(vllm_config, layout)


def _log_settings(
    vllm_config: VllmConfig, config: OffloadConfig, layout: CacheLayout, fingerprint: Fingerprint
) -> None:
    spec, transfer = layout.spec, vllm_config.kv_transfer_config
    chunk = spec.chunk_tokens
    per_chunk = sum(layout.largest_chunk_bytes(i) for i in spec.stored_groups) * layout.world_size
    capacity = config.ram.capacity
    logger.info(
        "HybridOffloadConnector: groups %s; chunk %d tokens, %s (%.0f bytes per token); "
        "ram %s holds about %d tokens; %ssmallest prompt that can hit %d tokens; loads %s, given up after %.3g s; "
        "kv_load_failure_policy %s; kv_role %s, so it %s; cache %s",
        ", ".join(f"{i} {group.kind.name} blocks of {group.block_tokens}" for i, group in enumerate(spec.groups)),
        chunk,
        format_size(per_chunk),
        per_chunk / chunk,
        format_size(capacity),
        capacity // per_chunk * chunk,
        "".join(_slower_words(name, tier, per_chunk, chunk) for name, tier in config.slower.items()),
        spec.boundary_tokens + 1,
        config.load,
        config.load_timeout_seconds,
        getattr(transfer, "kv_load_failure_policy", "unknown"),
        transfer.kv_role,
        role_of(transfer).words(),
        fingerprint.digest().hex()[:12],
    )


def _log_special_cases(vllm_config: VllmConfig, layout: CacheLayout) -> None:
    spec = layout.spec
    if not vllm_config.cache_config.enable_prefix_caching:
        logger.info(
            "HybridOffloadConnector: prefix caching is off, as without_prefix_caching says: the engine keeps nothing "
            "of its own, so every shared prefix is copied in again"
        )
    if any(group.lookahead_tokens for group in spec.groups):
        logger.info("HybridOffloadConnector: drafter groups are stored with the token after each chunk in their key")
    if not layout.reuses_hashes:
        logger.info("HybridOffloadConnector: block hashes change with the process, so tokens are hashed anew")
    if spec.tail_tokens is not None:
        logger.info(
            "HybridOffloadConnector: prompts resume inside blocks too, at multiples of %d tokens, where one ended",
            spec.tail_tokens,
        )
    scratch = [i for i, group in enumerate(spec.groups) if group.kind is GroupKind.SCRATCH]
    if scratch:
        logger.info("HybridOffloadConnector: groups %s are scratch and are not stored", scratch)


def _warn(vllm_config: VllmConfig, config: OffloadConfig) -> None:
    if config.disk is not None and compat.is_killed_on_shutdown(vllm_config):
        logger.warning(
            "HybridOffloadConnector: shutdown_timeout is 0, so a server kills its engine as soon as it is to end: "
            "what is on its way to %s then is lost, and the next start looks on disk for what the last seconds wrote; "
            "start the server with --shutdown-timeout 30, and let whoever stops it wait longer than that "
            "(an engine without a server has 5 s)",
            config.disk.path,
        )


def _warn_of_partial_copies(vllm_config: VllmConfig, layout: CacheLayout) -> None:
    if layout.spec.tail_tokens is not None and partly_copied_groups(vllm_config, layout):
        logger.warning(
            "HybridOffloadConnector: with this prefix_match_unit vLLM's own cache hits end inside blocks, and this "
            "version of it copies such a block in part (vllm-project/vllm#55112): requests that it resumes there may "
            "be answered wrongly, and nothing of them is stored; use a vLLM with that fixed, or unset "
            "prefix_match_unit"
        )


def _slower_words(name: str, tier: SecondaryTierConfig, per_chunk: int, chunk: int) -> str:
    if isinstance(tier, PeerTierConfig):
        return f"peer asks {len(tier.peers)} engines and is asked at {tier.listen}; "
    if isinstance(tier, ObjectTierConfig):
        who = "is trusted" if tier.secret_file is None else "needs the fleet's secret to be believed"
        return f"object finds and stores at {tier.url}, where whoever writes {who}; "
    if not isinstance(tier, DiskTierConfig):
        return f"{name}; "
    return f"disk {format_size(tier.capacity)} at {tier.path} holds about {tier.capacity // per_chunk * chunk} tokens; "


@dataclass(frozen=True, slots=True)
class BuilderInputs:
    """Inputs of the builder that are known when the connector is constructed.

    Args:
        vllm_config: final configuration of vLLM.
        config: configuration of the connector.
        layout: layout of the engine's groups.
        sizes: sizes of host memory.
        admission: admission of loads.
        metrics: metrics.
        prefill_stops: prefill stops that all children share. None for a connector without siblings.
    """

    vllm_config: VllmConfig
    config: OffloadConfig
    layout: CacheLayout
    sizes: ArenaSizes
    admission: LoadAdmission
    metrics: ConnectorMetrics
    prefill_stops: PrefillStops | None = None


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
            is_shared=bool(inputs.config.slower),
        )

    @property
    def needs_no_worker(self) -> bool:
        """True if no stored byte outlives the engine."""
        return self._identification.needs_no_worker

    @property
    def num_ranks(self) -> int:
        """Number of workers that must report their facts."""
        return self._identification.num_ranks

    def build(self, ranks: Mapping[int, Mapping[str, str]]) -> OffloadScheduler:
        """Opens the tiers and builds the scheduler's half.

        Args:
            ranks: facts of each worker.

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
                inputs.config.lookup_timeout_seconds,
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
        scheduler.distrust(suspect_groups("HybridOffloadConnector", inputs.vllm_config, inputs.layout))
        scheduler.set_keep_share(inputs.config.keep_share)
        announce(inputs.vllm_config, inputs.config, inputs.layout, fingerprint)
        return scheduler

    def _checkpoints(self, stack: TierStack) -> Checkpoints:
        inputs, config = self._inputs, self._inputs.config
        options = CheckpointOptions(
            max_stops=config.checkpoint_stops,
            has_answers=config.checkpoint_answers and not compat.drafts(inputs.vllm_config),
            step_tokens=max(1, round(STEP_S * (config.compute_tokens_per_second or FIRST_TOKENS_PER_S))),
            cut_tokens=compat.prefill_cut_tokens(inputs.vllm_config),
            has_drafts=compat.drafts(inputs.vllm_config),
        )
        return Checkpoints(
            inputs.layout,
            stack,
            [name for name, tier in config.slower.items() if tier.cascade == "all"],
            options,
            inputs.prefill_stops or PrefillStops(compat.max_chunk_tokens(inputs.vllm_config)),
            inputs.metrics,
            is_alone=inputs.prefill_stops is None,
        )
