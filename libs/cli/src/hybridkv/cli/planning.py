"""Plan of an engine for an operator: groups, chunk, capacity of each tier, and lines that the engine would log.

Groups, chunk and capacities come from the code that the engine runs at its start. No engine starts, no tier opens and
no weights are read, so an engine may still fail in these steps.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hybridkv.cli.output import ReportError
from hybridkv.connectors import checking
from hybridkv.connectors.config import ROOT, OffloadConfig, PeerTierConfig, format_size
from hybridkv.connectors.errors import SettingProblem
from hybridkv.connectors.vllm import CONNECTOR

if TYPE_CHECKING:
    from hybridkv.connectors.vllm.offload.startup_log import StartupReport

DEFAULT_TIERS: Final = ({"type": "ram", "capacity": "4GiB"},)


class PlanReport(msgspec.Struct, frozen=True):
    """Plan of one engine.

    Args:
        model: argument of the command.
        vllm: version of vLLM.
        device: device type that vLLM chose on this machine.
        max_model_len: tokens in the longest request.
        ranks: number of workers; each holds its own part of every chunk.
        startup: the startup log and its facts.
        bytes_per_token: bytes that a token takes in a tier, by kind of group, over all ranks.
        unused_tiers: tiers in which no request looks up a chunk, with the reason.
        warnings: problems that do not prevent a start.
        kv_transfer_config: value of --kv-transfer-config.
    """

    model: str
    vllm: str
    device: str
    max_model_len: int
    ranks: int
    startup: StartupReport
    bytes_per_token: dict[str, float]
    unused_tiers: dict[str, str]
    warnings: list[SettingProblem | str]
    kv_transfer_config: dict[str, Any]


def transfer_of(tiers: str | None) -> dict[str, Any]:
    """Object of --kv-transfer-config for a list of tiers in JSON. None: host memory of 4 GiB.

    Raises:
        ReportError: the text is not JSON.
    """
    try:
        found = list(DEFAULT_TIERS) if tiers is None else msgspec.json.decode(tiers)
    except msgspec.DecodeError as error:
        hint = '[{"type": "ram", "capacity": "4GiB"}]'
        raise ReportError(SettingProblem("error", "--tiers", "a list in JSON", str(error), hint)) from None
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        ROOT: {"tiers": found},
    }


def plan(model: str, transfer: Mapping[str, Any], options: Sequence[str]) -> PlanReport:
    """Plans an engine.

    Args:
        model: directory or name, as for `vllm serve`.
        transfer: the object of --kv-transfer-config.
        options: further options of `vllm serve`.

    Raises:
        ConfigurationError: the engine would refuse the model or the configuration for this model, in the same words.
        ReportError: a setting is wrong, vLLM is not installed or refuses, or the connector is not
            HybridOffloadConnector.
    """
    if transfer.get("kv_connector") != CONNECTOR:
        got = repr(transfer["kv_connector"]) if "kv_connector" in transfer else "nothing"
        raise ReportError(
            SettingProblem(
                "error", "kv_connector", f"{CONNECTOR}, the connector with tiers", got, "hybridkv check knows all"
            )
        )
    found = checking.check(transfer).problems
    for problem in found:
        if problem.severity == "error":
            raise ReportError(problem)

    from hybridkv.cli.engine_groups import plan_engine

    engine = plan_engine(model, transfer, options)
    vllm_config = engine.vllm_config

    from vllm.config import set_current_vllm_config

    from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import misfiled_warning
    from hybridkv.connectors.vllm.common.identity.configuration import configuration_facts
    from hybridkv.connectors.vllm.common.specs import cuts
    from hybridkv.connectors.vllm.offload.builder import check_settings
    from hybridkv.connectors.vllm.offload.startup_log import startup_report

    with set_current_vllm_config(vllm_config):
        config, layout, _ = check_settings(vllm_config, engine.kv_cache_config)
        cuts.require_divisible(vllm_config, layout)
        if config.secondary:
            configuration_facts(vllm_config, config.identity_ignores)
        startup = startup_report(vllm_config, config, layout)
        misfiled = misfiled_warning(CONNECTOR, vllm_config, layout.spec.groups)
    max_model_len = vllm_config.model_config.max_model_len
    warnings: list[SettingProblem | str] = [*found, *filter(None, [misfiled]), *startup.warnings]
    warnings += _room_warnings(startup, max_model_len)
    return PlanReport(
        model=model,
        vllm=engine.version,
        device=engine.device,
        max_model_len=max_model_len,
        ranks=layout.world_size,
        startup=startup,
        bytes_per_token=_bytes_per_token(startup),
        unused_tiers=dict(_unused_tiers(config, str(transfer.get("kv_role")))),
        warnings=warnings,
        kv_transfer_config=dict(transfer),
    )


def _bytes_per_token(startup: StartupReport) -> dict[str, float]:
    kinds: dict[str, float] = {}
    for group in startup.groups:
        kinds[group.kind] = kinds.get(group.kind, 0.0) + group.chunk_bytes / startup.chunk_tokens
    return kinds


def _room_warnings(startup: StartupReport, max_model_len: int) -> Iterator[str]:
    capacity = startup.tiers[0].capacity_bytes or 0
    state_bytes = sum(group.chunk_bytes for group in startup.groups if group.kind == "RECURRENT")
    # A prompt needs one state, not one for each chunk.
    held = max(0, capacity - state_bytes) * startup.chunk_tokens // max(1, startup.chunk_bytes - state_bytes)
    if held < max_model_len:
        yield (
            f"host memory holds {held:,} tokens of one prompt, fewer than max_model_len {max_model_len:,}: a longer "
            "prompt is restored in part; raise the capacity of the ram tier"
        )


def _unused_tiers(config: OffloadConfig, role: str) -> Iterator[tuple[str, str]]:
    for name, tier in config.secondary.items():
        if role == "kv_producer":
            yield name, "kv_role kv_producer stores only"
        elif isinstance(tier, PeerTierConfig) and not tier.allowed_hosts and not set(tier.peers) - {tier.listen}:
            yield name, "peers names no other engine"


def plan_text(report: PlanReport) -> str:
    """Text of the plan, for people."""
    startup = report.startup
    ranks = f"{report.ranks} ranks" if report.ranks > 1 else "1 rank"
    rows = [("group", "kind", "layers", "block tokens", "bytes a token")]
    rows += (
        (
            str(group.index),
            group.kind,
            f"{group.layers:,}",
            f"{group.block_tokens:,}",
            f"{group.chunk_bytes / startup.chunk_tokens:,.0f}" if group.chunk_bytes else "not stored",
        )
        for group in startup.groups
    )
    lines = [
        f"{report.model}: max_model_len {report.max_model_len:,}, {ranks}, vLLM {report.vllm} on {report.device}",
        "",
        *_table(rows),
        "",
    ]
    facts = [
        ("bytes a token", ", ".join(f"{kind} {number:,.0f}" for kind, number in report.bytes_per_token.items())),
        ("chunk", f"{startup.chunk_tokens:,} tokens, {format_size(startup.chunk_bytes)}"),
        ("smallest prompt that can hit", f"{startup.smallest_prompt_tokens:,} tokens"),
        *((f"tier {tier.name}", _tier_text(report, tier.name, tier.tokens)) for tier in startup.tiers),
    ]
    width = max(len(name) for name, _ in facts)
    lines += [f"{name:<{width}}  {words}" for name, words in facts]
    lines += ["", "An engine logs at its start:", "", startup.line, *startup.notes]
    if report.warnings:
        lines.append("")
        lines += (each.text() if isinstance(each, SettingProblem) else f"warning: {each}" for each in report.warnings)
    return "\n".join([*lines, "", f"--kv-transfer-config {shlex.quote(json.dumps(report.kv_transfer_config))}"])


def _tier_text(report: PlanReport, name: str, tokens: int | None) -> str:
    why = f"no request looks there: {report.unused_tiers[name]}" if name in report.unused_tiers else ""
    if tokens is not None:
        return "; ".join(filter(None, [f"holds {tokens:,} tokens", why]))
    if why:
        return why
    return "is looked up for each prompt; a request waits while that is expected to save time"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table. The first two columns are aligned to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:<{width}}" if i < 2 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
