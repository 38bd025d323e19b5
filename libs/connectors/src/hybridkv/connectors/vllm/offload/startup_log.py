"""Startup log: the lines about groups, tiers and role that an engine logs when its store opens.

`hybridkv plan` prints the same lines before an engine is started.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from hybridkv.connectors.config import (
    DiskTierConfig,
    ObjectTierConfig,
    OffloadConfig,
    PeerTierConfig,
    SecondaryTierConfig,
    format_size,
    name_of,
)
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import partly_copied_groups
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.role import role_of
from hybridkv.planner import GroupKind
from hybridkv.tiers.disk import DEFAULT_MAX_RECORDS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybridkv.hashing import Fingerprint

logger = logging.getLogger("vllm.hybridkv")


class GroupReport(msgspec.Struct, frozen=True):
    """One of the engine's groups.

    Args:
        index: the engine's index of the group.
        kind: kind of the group.
        layers: number of stored layers; 0 for a scratch group.
        block_tokens: tokens in one block.
        chunk_bytes: bytes of the group's part of a chunk, over all ranks; 0 if the group is not stored.
    """

    index: int
    kind: str
    layers: int
    block_tokens: int
    chunk_bytes: int


class TierReport(msgspec.Struct, frozen=True):
    """One configured tier.

    Args:
        name: type of the tier.
        capacity_bytes: capacity over all ranks; None for a tier without a limit of its own.
        tokens: tokens of one prompt that fit into the tier, in whole chunks; None without a limit.
        text: the tier's part of the start line.
    """

    name: str
    capacity_bytes: int | None
    tokens: int | None
    text: str


class StartupReport(msgspec.Struct, frozen=True):
    """Facts of the startup log.

    Args:
        groups: all groups, in the engine's order.
        chunk_tokens: tokens in a chunk.
        chunk_bytes: bytes of a chunk of all groups, over all ranks.
        tiers: all tiers, in lookup order.
        smallest_prompt_tokens: tokens of the shortest prompt that can hit.
        line: the start line, without the name of the cache, which `log_startup` adds.
        notes: further lines.
        warnings: lines about settings, or about an engine, that do less than an operator expects.
    """

    groups: tuple[GroupReport, ...]
    chunk_tokens: int
    chunk_bytes: int
    tiers: tuple[TierReport, ...]
    smallest_prompt_tokens: int
    line: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def startup_report(vllm_config: VllmConfig, config: OffloadConfig, layout: CacheLayout) -> StartupReport:
    """Facts and log lines for an engine with these groups and settings."""
    spec, chunk = layout.spec, layout.spec.chunk_tokens
    part_bytes = {i: layout.largest_chunk_bytes(i) * layout.world_size for i in spec.stored_groups}
    groups = tuple(
        GroupReport(i, group.kind.name, len(layout.layers[i]), group.block_tokens, part_bytes.get(i, 0))
        for i, group in enumerate(spec.groups)
    )
    chunk_bytes = sum(part_bytes.values())
    capacity = config.ram.capacity
    num_tokens = capacity // chunk_bytes * chunk
    ram = f"ram {format_size(capacity)} holds about {num_tokens} tokens"
    tiers = [TierReport(name_of(config.ram), capacity, num_tokens, ram)]
    tiers += (_tier_report(name, tier, layout, chunk_bytes) for name, tier in config.secondary.items())
    transfer = vllm_config.kv_transfer_config
    parts = [
        "groups " + ", ".join(f"{each.index} {each.kind} blocks of {each.block_tokens}" for each in groups),
        f"chunk {chunk} tokens, {format_size(chunk_bytes)} ({chunk_bytes / chunk:.0f} bytes per token)",
        *(tier.text for tier in tiers),
        f"smallest prompt that can hit {spec.boundary_tokens + 1} tokens",
        f"loads {config.load}, given up after {config.load_timeout_seconds:.3g} s",
        f"kv_load_failure_policy {getattr(transfer, 'kv_load_failure_policy', 'unknown')}",
        f"kv_role {transfer.kv_role}, so it {role_of(transfer).words()}",
    ]
    return StartupReport(
        groups,
        chunk,
        chunk_bytes,
        tuple(tiers),
        spec.boundary_tokens + 1,
        f"HybridOffloadConnector: {'; '.join(parts)}",
        tuple(_notes(vllm_config, layout)),
        tuple(_warnings(vllm_config, config, layout, chunk_bytes)),
    )


def log_startup(vllm_config: VllmConfig, config: OffloadConfig, layout: CacheLayout, fingerprint: Fingerprint) -> None:
    """Logs the start line with the name of the cache, then the notes and warnings."""
    report = startup_report(vllm_config, config, layout)
    logger.info("%s; cache %s", report.line, fingerprint.digest().hex()[:12])
    for note in report.notes:
        logger.info("%s", note)
    for warning in report.warnings:
        logger.warning("%s", warning)


def _tier_report(name: str, tier: SecondaryTierConfig, layout: CacheLayout, chunk_bytes: int) -> TierReport:
    if isinstance(tier, PeerTierConfig):
        return TierReport(name, None, None, _peer_text(tier))
    if isinstance(tier, ObjectTierConfig):
        who = "every writer is trusted" if tier.secret_file is None else "only writers with the secret are trusted"
        return TierReport(name, None, None, f"object finds and stores at {tier.url}, where {who}")
    if not isinstance(tier, DiskTierConfig):
        return TierReport(name, None, None, name)
    num_chunks = min(tier.capacity // chunk_bytes, DEFAULT_MAX_RECORDS // len(layout.spec.stored_groups))
    num_tokens = num_chunks * layout.spec.chunk_tokens
    text = f"disk {format_size(tier.capacity)} at {tier.path} holds about {num_tokens} tokens"
    return TierReport(name, tier.capacity, num_tokens, text)


def _peer_text(tier: PeerTierConfig) -> str:
    num_listed = len(set(tier.peers) - {tier.listen})
    sources = [f"at {num_listed} listed peers"] if num_listed or not tier.allowed_hosts else []
    if tier.allowed_hosts:
        sources.append(f"at peers that hints name in {', '.join(tier.allowed_hosts)}")
    return f"peer looks up {' and '.join(sources)}, listens at {tier.listen}"


def _notes(vllm_config: VllmConfig, layout: CacheLayout) -> list[str]:
    spec, notes = layout.spec, []
    if not vllm_config.cache_config.enable_prefix_caching:
        notes.append(
            "HybridOffloadConnector: prefix caching is off, as without_prefix_caching says: the engine keeps nothing "
            "of its own, so every shared prefix is copied in again"
        )
    if any(group.lookahead_tokens for group in spec.groups):
        notes.append("HybridOffloadConnector: drafter groups are stored with the token after each chunk in their key")
    if not layout.reuses_hashes:
        notes.append("HybridOffloadConnector: block hashes change with the process, so tokens are hashed anew")
    if spec.tail_tokens is not None:
        notes.append(
            f"HybridOffloadConnector: prompts resume inside blocks too, at multiples of {spec.tail_tokens} tokens, "
            "where an earlier prompt ended"
        )
    scratch = [i for i, group in enumerate(spec.groups) if group.kind is GroupKind.SCRATCH]
    if scratch:
        notes.append(f"HybridOffloadConnector: groups {scratch} are scratch and are not stored")
    return notes


def _warnings(vllm_config: VllmConfig, config: OffloadConfig, layout: CacheLayout, chunk_bytes: int) -> list[str]:
    warnings = []
    per_chunk = len(layout.spec.stored_groups)
    if config.disk is not None and config.disk.capacity // chunk_bytes > DEFAULT_MAX_RECORDS // per_chunk:
        most = DEFAULT_MAX_RECORDS // per_chunk * chunk_bytes
        warnings.append(
            f"HybridOffloadConnector: the index of the disk has room for {DEFAULT_MAX_RECORDS} records, which take "
            f"{format_size(most)} of the {format_size(config.disk.capacity)}; use a larger chunk_tokens"
        )
    if config.disk is not None and compat.is_killed_on_shutdown(vllm_config):
        warnings.append(
            "HybridOffloadConnector: shutdown_timeout is 0, so a server kills its engine at once when it stops. Copies "
            f"to {config.disk.path} that still run are lost, and the next start must scan the newest records. Start "
            "with --shutdown-timeout 30, and give the supervisor a longer limit (an engine without a server has 5 s)"
        )
    if layout.spec.tail_tokens is not None and partly_copied_groups(vllm_config, layout):
        warnings.append(
            "HybridOffloadConnector: with this prefix_match_unit vLLM's own cache hits end inside blocks, and this "
            "version of it copies such a block in part (vllm-project/vllm#55112): requests that it resumes there may "
            "be answered wrongly, and nothing of them is stored; use a fixed vLLM, or unset "
            "prefix_match_unit"
        )
    return warnings
