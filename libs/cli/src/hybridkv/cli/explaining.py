"""Summary of the explain log: sources of the requests' tokens, reasons for shorter hits, and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from hybridkv.cli.output import ReportError
from hybridkv.connectors.errors import SettingProblem
from hybridkv.connectors.vllm.common.explain import Explanation, LookupReason

_RECORD_START: Final = '{"request_id":'
_REUSE: Final = "reuse of "
_BREAK_EVEN: Final = "break-even of "
ADVICE: Final[dict[str, str]] = {
    LookupReason.COMPLETE: "",
    LookupReason.PREFIX_ENDS: "",
    LookupReason.GROUP_LIMITS: "lower chunk_tokens; states are stored where prompts diverge",
    LookupReason.TIER_ROOM: "more host memory",
    LookupReason.ENGINE_ROOM: "more GPU memory for the KV cache",
    LookupReason.NOT_TAKEN: "",
    LookupReason.NO_BOUNDARY: "lower chunk_tokens, if prompts are short",
    LookupReason.NOT_STORED: "a larger tier, if there are evictions",
    LookupReason.TIMEOUT: "a faster tier, or a longer load_timeout_seconds",
    LookupReason.FAILED_LOADS: "see the log of the engine",
    LookupReason.HINT: "",
    LookupReason.ADAPTER: "see the log of the engine",
}
"""Advice for an operator, by the reason why no more tokens were offered. docs/guides/observing.md has more."""


class ReasonRow(msgspec.Struct, frozen=True):
    """Requests with one reason.

    Args:
        reason: why no more tokens were offered.
        requests: number of requests.
        compute_tokens: tokens that these requests computed.
        advice: advice for the operator; "" if nothing has to be done.
    """

    reason: str
    requests: int
    compute_tokens: int
    advice: str


class ExplainReport(msgspec.Struct, frozen=True):
    """Sums over an explain log.

    Args:
        requests: number of admitted requests; a request that starts over counts again.
        hits: number of requests for which a tier had more tokens than the engine.
        tokens: tokens of all requests.
        by_source: tokens by source: "engine", a tier, or "compute".
        reasons: rows, those with the most computed tokens first.
        lost_tokens: tokens that were computed because a state or window was missing, by kind of group.
        reuse: the engine's last log line with estimates for other sizes of host memory; "" if there is none.
        break_even: for each tier, the engine's last log line about the shortest hit for which requests wait.
        other_lines: number of lines without a record.
    """

    requests: int
    hits: int
    tokens: int
    by_source: dict[str, int]
    reasons: list[ReasonRow]
    lost_tokens: dict[str, int]
    reuse: str
    break_even: dict[str, str]
    other_lines: int


def summarize(lines: Iterable[str], name: str) -> ExplainReport:
    """Summarizes a log. Records may be between other lines, and may follow a prefix of the logger.

    Args:
        lines: lines of the log.
        name: name of the log, for errors.

    Raises:
        ReportError: the log has no record.
    """
    decode = msgspec.json.Decoder(Explanation).decode
    requests, computed, sources, lost = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    hits = tokens = other_lines = 0
    reuse, break_even = "", dict[str, str]()
    for line in lines:
        start = line.find(_RECORD_START)
        try:
            record = decode(line[start:]) if start >= 0 else None
        except msgspec.DecodeError:
            record = None
        if record is None:
            other_lines += 1
            if _REUSE in line and "unbounded" in line:
                reuse = line[line.index(_REUSE) :].strip()
            elif (at := line.find(_BREAK_EVEN)) >= 0 and " for " in line[at:]:
                text = line[at:].strip()
                break_even[text[len(_BREAK_EVEN) :].partition(":")[0]] = text
            continue
        requests[record.reason] += 1
        computed[record.reason] += record.compute_tokens
        hits += record.result == "hit"
        tokens += record.num_tokens
        sources["engine"] += record.engine_tokens
        sources[record.source] += record.offered_tokens
        sources["compute"] += record.compute_tokens
        if record.lost_tokens:
            lost[record.limiting_kind] += record.lost_tokens
    if not requests:
        raise ReportError(
            SettingProblem(
                "error",
                name,
                "lines of the logger vllm.hybridkv.explain",
                f"{other_lines} other lines",
                "start vLLM with VLLM_LOGGING_CONFIG_PATH=deploy/vllm/explain-logging.json",
            )
        )
    rows = [ReasonRow(reason, requests[reason], computed[reason], ADVICE[reason]) for reason in requests]
    return ExplainReport(
        requests=requests.total(),
        hits=hits,
        tokens=tokens,
        by_source={source: number for source, number in sources.most_common() if number},
        reasons=sorted(rows, key=lambda row: -row.compute_tokens),
        lost_tokens=dict(lost.most_common()),
        reuse=reuse,
        break_even=break_even,
        other_lines=other_lines,
    )


def explain_text(report: ExplainReport) -> str:
    """The report for people."""
    shares = ", ".join(f"{source} {_percent(number, report.tokens)}" for source, number in report.by_source.items())
    lines = [
        f"{report.requests:,} requests, {_percent(report.hits, report.requests)} of them hits",
        f"{report.tokens:,} tokens: {shares}",
        "",
    ]
    header: tuple[str, ...] = ("why not more", "requests", "tokens computed", "what helps")
    table = [header] + [
        (row.reason, f"{row.requests:,}", f"{row.compute_tokens:,}", row.advice) for row in report.reasons
    ]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    lines += [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in table
    ]
    if report.lost_tokens:
        kinds = ", ".join(f"{kind} {number:,}" for kind, number in report.lost_tokens.items())
        lines += ["", f"tokens lost for want of a state or window: {kinds}"]
    if report.reuse:
        lines += ["", report.reuse]
    if report.break_even:
        lines += ["", *report.break_even.values()]
    return "\n".join(lines)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
