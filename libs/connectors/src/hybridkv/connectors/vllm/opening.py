"""From facts to an open store: what the scheduler's half does once it knows whose content it keeps.

Host memory alone begins with the engine and ends with it, so nobody else ever reads a key of it, and it opens at once.
What outlives the engine opens when the workers have said what they alone know.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.config import OffloadConfig
from hybridkv.connectors.vllm import tiers
from hybridkv.connectors.vllm.announcement import announce
from hybridkv.connectors.vllm.duties import duties_of
from hybridkv.connectors.vllm.identity import EngineFacts, engine_facts, without_ignored
from hybridkv.connectors.vllm.identity.adapters import Adapters
from hybridkv.connectors.vllm.identity.recurrent import that_matter
from hybridkv.connectors.vllm.identity.worker_facts import merged
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.loads import Deadlines
from hybridkv.connectors.vllm.scheduler import Identity, OffloadScheduler
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.connectors.vllm.tiers import ArenaSizes
from hybridkv.hashing import ChunkKeys
from hybridkv.planner import LoadAdmission

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hybridkv")


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
    """

    vllm_config: VllmConfig
    config: OffloadConfig
    layout: CacheLayout
    sizes: ArenaSizes
    admission: LoadAdmission
    recorder: Recorder


class Opening:
    """What remains to be known before the store opens, and the opening.

    Args:
        plan: what is settled.

    Raises:
        ConfigurationError: the engine's own facts cannot be gathered.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began_ns = time.time_ns()
        self._engine = _of_memory_alone() if self.needs_no_worker else _of_engine(plan)

    @property
    def needs_no_worker(self) -> bool:
        """Whether nothing that is stored outlives the engine."""
        return not self._plan.config.slower

    @property
    def num_ranks(self) -> int:
        """How many workers must say what they know."""
        return self._plan.layout.world_size

    def open(self, ranks: Mapping[int, Mapping[str, str]]) -> OffloadScheduler:
        """Opens the store.

        Args:
            ranks: what each worker said.

        Raises:
            ConfigurationError: a tier cannot be opened, or what is to be ignored is no fact.
        """
        plan, facts = self._plan, self._engine.facts
        if not self.needs_no_worker:
            facts = without_ignored(facts | merged(ranks, facts), plan.config.identity_ignores)
            facts = that_matter(facts, plan.layout.spec)
        fingerprint = plan.layout.fingerprint(facts)
        keys = ChunkKeys(fingerprint, plan.layout.hash_block_tokens)
        scheduler = OffloadScheduler(
            plan.layout,
            Identity(keys, Adapters(keys, self._began_ns)),
            tiers.build_stack(plan.config, plan.layout, fingerprint, plan.sizes),
            plan.admission,
            Deadlines(
                plan.config.lookup_timeout_seconds,
                plan.config.load_timeout_seconds,
                tiers.clock,
                plan.config.compute_tokens_per_second,
            ),
            plan.recorder,
            duties_of(plan.vllm_config.kv_transfer_config),
        )
        announce(plan.vllm_config, plan.config, plan.layout, fingerprint)
        return scheduler


def _of_engine(plan: Plan) -> EngineFacts:
    found = engine_facts(plan.vllm_config, os.environ, plan.config)
    if found.unrepeatable:
        logger.warning(
            "HybridOffloadConnector: no other process will find what this engine leaves on disk: %s",
            "; ".join(f"{name}: {why}" for name, why in sorted(found.unrepeatable.items())),
        )
    return found


def _of_memory_alone() -> EngineFacts:
    return EngineFacts({"engine.process": secrets.token_hex(16)}, {})
