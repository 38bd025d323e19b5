"""`hybridkv explain` summarizes the explain log, whatever other lines it contains."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from click.testing import CliRunner, Result

from hybridkv.cli.app import main
from hybridkv.cli.explaining import ADVICE
from hybridkv.connectors.vllm.common.explain import Explanation, LookupReason

REUSE = "reuse of 4000 prompt tokens, by size of host memory (1x is 1.0 GiB): 0.25x 1 %, unbounded 60 %"
BREAK_EVEN = "break-even of peer: requests wait for hits of 301 tokens or more (an answer takes 2.0 ms)"


def record(reason: LookupReason, *, engine: int = 0, offered: int = 0, compute: int = 100, **more: object) -> str:
    return msgspec.json.encode(
        Explanation(
            request_id="request",
            result="hit" if offered else "miss",
            reason=reason,
            num_tokens=engine + offered + compute,
            engine_tokens=engine,
            offered_tokens=offered,
            compute_tokens=compute,
            source="ram" if offered else "",
            **more,  # type: ignore[arg-type]
        )
    ).decode()


LINES = [
    "INFO 11-27 10:00:00 [core.py:1] some other line",
    record(LookupReason.COMPLETE, engine=50, offered=800, compute=50),
    "DEBUG 11-27 10:00:01 [explain.py:215] " + record(LookupReason.NOT_STORED, compute=1000),
    record(LookupReason.GROUP_LIMITS, compute=300, limiting_kind="recurrent", lost_tokens=256),
    '{"request_id":"cut off in the mid',
    f"INFO 11-27 10:00:02 [reuse.py:110] {REUSE}",
    record(LookupReason.NOT_STORED, compute=800),
]


def run_explain(tmp_path: Path, lines: list[str], *options: str) -> Result:
    log = tmp_path / "explain.jsonl"
    log.write_text("\n".join(lines))
    return CliRunner().invoke(main, ["explain", str(log), *options])


def test_the_report_has_sums_and_advice(tmp_path: Path) -> None:
    result = run_explain(tmp_path, LINES)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[:2] == ["4 requests, 25.0 % of them hits", "3,000 tokens: compute 71.7 %, ram 26.7 %, engine 1.7 %"]
    assert [line.split()[:3] for line in lines[4:7]] == [
        ["not_stored", "2", "1,800"],
        ["group_limits", "1", "300"],
        ["complete", "1", "50"],
    ]
    assert "a larger tier" in lines[4]
    assert "tokens lost for want of a state or window: recurrent 256" in lines
    assert lines[-1] == REUSE


def test_the_json_report_is_one_document(tmp_path: Path) -> None:
    report = json.loads(run_explain(tmp_path, LINES, "--json").stdout)
    assert (report["requests"], report["hits"], report["tokens"], report["other_lines"]) == (4, 1, 2150 + 850, 3)
    assert report["by_source"] == {"compute": 2150, "ram": 800, "engine": 50}
    assert report["reuse"] == REUSE


def test_the_last_break_even_of_each_tier_is_shown(tmp_path: Path) -> None:
    """If the log has one."""
    other = BREAK_EVEN.replace("peer", "object")
    lines = [*LINES, f"INFO [a.py:1] {other.replace('301', '999')}", f"INFO [a.py:1] {BREAK_EVEN}", f"INFO {other}"]
    assert run_explain(tmp_path, lines).stdout.splitlines()[-2:] == [other, BREAK_EVEN]
    assert json.loads(run_explain(tmp_path, lines, "--json").stdout)["break_even"] == {
        "object": other,
        "peer": BREAK_EVEN,
    }
    assert json.loads(run_explain(tmp_path, LINES, "--json").stdout)["break_even"] == {}


def test_the_log_may_come_from_stdin() -> None:
    result = CliRunner().invoke(main, ["explain", "-"], input=record(LookupReason.COMPLETE) + "\n")
    assert result.stdout.startswith("1 requests")


def test_a_log_without_records_says_how_to_get_them(tmp_path: Path) -> None:
    result = run_explain(tmp_path, ["INFO nothing", "more"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "explain.jsonl: expected lines of the logger vllm.hybridkv.explain, got 2 other lines" in result.stderr
    assert "explain-logging.json" in result.stderr
    missing = CliRunner().invoke(main, ["explain", str(tmp_path / "none")])
    assert missing.exit_code == 2 and "none: expected a readable file" in missing.stderr


def test_every_reason_has_advice() -> None:
    assert set(ADVICE) == set(LookupReason)
