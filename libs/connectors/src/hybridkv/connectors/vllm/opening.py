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

from hybridkv.connectors.config import DiskTierConfig, OffloadConfig, format_size
from hybridkv.connectors.vllm import compat, tiers
from hybridkv.connectors.vllm.admission import LoadAdmission
from hybridkv.connectors.vllm.duties import duties_of
from hybridkv.connectors.vllm.identity import EngineFacts, engine_facts, without_ignored
from hybridkv.connectors.vllm.identity.adapters import Adapters
from hybridkv.connectors.vllm.identity.worker_facts import merged
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.loads import Deadlines
from hybridkv.connectors.vllm.scheduler import Identity, OffloadScheduler
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.connectors.vllm.tiers import ArenaSizes
from hybridkv.hashing import ChunkKeys, Fingerprint
from hybridkv.planner import GroupKind

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
        return self._plan.config.disk is None

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
        fingerprint = plan.layout.fingerprint(facts)
        keys = ChunkKeys(fingerprint, plan.layout.hash_block_tokens)
        scheduler = OffloadScheduler(
            plan.layout,
            Identity(keys, Adapters(keys, self._began_ns)),
            tiers.build_stack(plan.config, plan.layout, fingerprint, plan.sizes),
            plan.admission,
            Deadlines(plan.config.lookup_timeout_seconds, plan.config.load_timeout_seconds, tiers.clock),
            plan.recorder,
            duties_of(plan.vllm_config.kv_transfer_config),
        )
        _say_what_was_understood(plan, fingerprint)
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


def _say_what_was_understood(plan: Plan, fingerprint: Fingerprint) -> None:
    layout, config, transfer = plan.layout, plan.config, plan.vllm_config.kv_transfer_config
    duties = duties_of(transfer)
    spec = layout.spec
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
        _disk_words(config.disk, per_chunk, chunk),
        chunk + 1,
        config.load,
        config.load_timeout_seconds,
        getattr(transfer, "kv_load_failure_policy", "unknown"),
        transfer.kv_role,
        duties.words(),
        fingerprint.digest().hex()[:12],
    )
    if config.disk is None and not (duties.loads and duties.stores):
        logger.warning(
            "HybridOffloadConnector: kv_role %s without a disk tier is of no use: host memory ends with the engine, so "
            "what it %s; add a disk tier, or say kv_both",
            transfer.kv_role,
            "stores nobody loads" if duties.stores else "could load nobody stores",
        )
    if not plan.vllm_config.cache_config.enable_prefix_caching:
        logger.info(
            "HybridOffloadConnector: prefix caching is off, as without_prefix_caching says: the engine keeps nothing "
            "of its own, so every shared prefix is copied in again"
        )
    if any(group.lookahead_tokens for group in spec.groups):
        logger.info("HybridOffloadConnector: drafter groups are stored with the token after each chunk in their key")
    if not layout.reuses_hashes:
        logger.info("HybridOffloadConnector: block hashes change with the process, so tokens are hashed anew")
    if config.disk is not None and compat.is_killed_at_its_end(plan.vllm_config):
        logger.warning(
            "HybridOffloadConnector: shutdown_timeout is 0, so a server kills its engine as soon as it is to end: "
            "what is on its way to %s then is lost, and the next start looks on disk for what the last seconds wrote; "
            "start the server with --shutdown-timeout 30, and let whoever stops it wait longer than that "
            "(an engine without a server has 5 s)",
            config.disk.path,
        )
    scratch = [i for i, group in enumerate(spec.groups) if group.kind is GroupKind.SCRATCH]
    if scratch:
        logger.info("HybridOffloadConnector: groups %s are scratch and are not stored", scratch)


def _disk_words(disk: DiskTierConfig | None, per_chunk: int, chunk: int) -> str:
    if disk is None:
        return ""
    return f"disk {format_size(disk.capacity)} at {disk.path} holds about {disk.capacity // per_chunk * chunk} tokens; "
