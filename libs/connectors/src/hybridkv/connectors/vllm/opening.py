"""From facts to an open store: what the scheduler's half does once it knows whose content it keeps.

Host memory alone begins with the engine and ends with it, so nobody else ever reads a key of it, and it opens at once.
What outlives the engine opens when the workers have said what they alone know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.config import OffloadConfig
from hybridkv.connectors.vllm import compat, tiers
from hybridkv.connectors.vllm.announcement import announce
from hybridkv.connectors.vllm.checkpoints import STEP_S, CheckpointOptions, Checkpoints, has_states
from hybridkv.connectors.vllm.duties import duties_of
from hybridkv.connectors.vllm.identification import Identification
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.loads import Deadlines
from hybridkv.connectors.vllm.scheduler import OffloadScheduler
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.connectors.vllm.steering import Steering
from hybridkv.connectors.vllm.tiers import ArenaSizes
from hybridkv.connectors.vllm.wrong_blocks import distrusted_groups
from hybridkv.planner import LoadAdmission
from hybridkv.tiers.stack import TierStack

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Plan:
    """What is settled when the scheduler's half is built.

    Args:
        vllm_config: final.
        config: of the operator.
        layout: of the engine's groups.
        sizes: of host memory.
        admission: of loads.
        recorder: counts what happens.
        steering: of all children's prefills, None for a connector that stands alone.
    """

    vllm_config: VllmConfig
    config: OffloadConfig
    layout: CacheLayout
    sizes: ArenaSizes
    admission: LoadAdmission
    recorder: Recorder
    steering: Steering | None = None


class Opening:
    """What remains to be known before the store opens, and the opening.

    Args:
        plan: what is settled.

    Raises:
        ConfigurationError: the engine's own facts cannot be gathered.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._identification = Identification(
            plan.vllm_config, plan.config, plan.layout, "HybridOffloadConnector", is_shared=bool(plan.config.slower)
        )

    @property
    def needs_no_worker(self) -> bool:
        """Whether nothing that is stored outlives the engine."""
        return self._identification.needs_no_worker

    @property
    def num_ranks(self) -> int:
        """How many workers must say what they know."""
        return self._identification.num_ranks

    def open(self, ranks: Mapping[int, Mapping[str, str]]) -> OffloadScheduler:
        """Opens the store.

        Args:
            ranks: what each worker said.

        Raises:
            ConfigurationError: a tier cannot be opened, or what is to be ignored is no fact.
        """
        plan = self._plan
        identity = self._identification.identity(ranks)
        fingerprint = identity.keys.fingerprint
        stack = tiers.build_stack(plan.config, plan.layout, fingerprint, plan.sizes)
        scheduler = OffloadScheduler(
            plan.layout,
            identity,
            stack,
            plan.admission,
            Deadlines(
                plan.config.lookup_timeout_seconds,
                plan.config.load_timeout_seconds,
                tiers.clock,
                plan.config.compute_tokens_per_second,
            ),
            plan.recorder,
            dataclasses.replace(
                duties_of(plan.vllm_config.kv_transfer_config),
                copies_locally=plan.config.local_copies and not compat.hashes_before_computing(plan.vllm_config),
            ),
        )
        if plan.config.checkpoints != "off" and has_states(plan.layout):
            scheduler.bind_checkpoints(self._checkpoints(stack))
        scheduler.distrust(distrusted_groups("HybridOffloadConnector", plan.vllm_config, plan.layout))
        scheduler.keep_at_most(plan.config.keep_share)
        announce(plan.vllm_config, plan.config, plan.layout, fingerprint)
        return scheduler

    def _checkpoints(self, stack: TierStack) -> Checkpoints:
        plan, config = self._plan, self._plan.config
        options = CheckpointOptions(
            max_stops=config.checkpoint_stops,
            has_answers=config.checkpoint_answers and not compat.drafts(plan.vllm_config),
            step_tokens=max(1, round(STEP_S * config.compute_tokens_per_second)),
            cut_tokens=compat.prefill_cut_tokens(plan.vllm_config),
            has_drafts=compat.drafts(plan.vllm_config),
        )
        return Checkpoints(
            plan.layout,
            stack,
            [name for name, tier in config.slower.items() if tier.cascade == "all"],
            options,
            plan.steering or Steering(compat.most_chunk_tokens(plan.vllm_config)),
            plan.recorder,
            is_alone=plan.steering is None,
        )
