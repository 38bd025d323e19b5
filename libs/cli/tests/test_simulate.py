"""`hybridkv simulate`: traces are read as prefixes, and hit rates follow from the size of host memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner, Result

from hybridkv.cli.app import main
from hybridkv.cli.simulation.policies import PromptEnds
from hybridkv.cli.simulation.store import CostModel, simulate, unique_chunks
from hybridkv.cli.simulation.traces import chained, in_chunks, read_agents, read_mooncake, read_trace
from hybridkv.connectors.vllm.offload.startup_log import GroupReport, StartupReport, TierReport

ROOM = 100_000


def write_lines(file: Path, lines: list[dict[str, Any]]) -> Path:
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty prompts about twenty documents: eight shared chunks of 512 tokens, and two of their own."""
    lines = []
    for i in range(60):
        shared, own = [1000 * (i % 20) + place for place in range(8)], [100_000 + 10 * i, 100_001 + 10 * i]
        lines.append({"timestamp": i, "input_length": 10 * 512 + 100, "hash_ids": [*shared, *own, -i]})
    return write_lines(tmp_path / "trace.jsonl", lines)


def plan(chunk_tokens: int, state_bytes: int) -> str:
    """The document of `hybridkv plan --json` for a model with 1 KiB of attention a token."""
    attention = 1024 * chunk_tokens
    groups = (GroupReport(0, "FULL", 2, 128, attention), GroupReport(1, "RECURRENT", 6, 128, state_bytes))
    startup = StartupReport(
        groups=groups[: 2 if state_bytes else 1],
        chunk_tokens=chunk_tokens,
        chunk_bytes=attention + state_bytes,
        tiers=(TierReport("ram", 16 << 20, 0, ""),),
        smallest_prompt_tokens=chunk_tokens + 1,
        line="",
        notes=(),
        warnings=(),
    )
    return msgspec.json.encode({"model": "tiny", "startup": startup}).decode()


def run_simulate(trace: Path, *options: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, ["simulate", str(trace), *options], input=stdin)


def test_the_stored_tokens_of_a_trace_equal_those_counted_by_hand() -> None:
    trace, costs = chained("two", 10, [(31, "abc"), (31, "abd")]), CostModel(step_tokens=8)
    outcome = simulate(trace, ROOM, costs, PromptEnds())
    assert (outcome.total_tokens, outcome.hit_tokens) == (62, 0)
    assert outcome.stored_tokens == 10 * (4 + 2 * 4)
    assert simulate(trace, ROOM, costs, None).hit_tokens == 20
    assert unique_chunks(trace, costs) == 4 + 2 * 4


def test_a_state_smaller_than_a_chunk_costs_its_share_alone() -> None:
    trace = chained("two", 80, [(161, "ab"), (161, "cd")])
    outcome = simulate(trace, ROOM, CostModel(state_chunks=0.25), PromptEnds())
    assert outcome.stored_tokens == 4 * 80 + 2 * 20


def test_traces_are_read_as_prefixes(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"timestamp": 2, "input_length": 1_030, "hash_ids": [0, 7, 9]},
        {"timestamp": 1, "input_length": 1_024, "hash_ids": [0, 7]},
    ]
    mooncake = write_lines(tmp_path / "trace.jsonl", lines)
    first, second = read_mooncake(mooncake, "m").requests
    assert (first.num_tokens, second.num_tokens) == (1_024, 1_030) and first.chunks == second.chunks == (0, 1)
    assert read_trace(mooncake).requests == (first, second)
    mooncake.unlink()
    lines = [{"timestamp": 1, "input": "a" * 1_030}, {"timestamp": 2, "input": ""}]
    write_lines(tmp_path / "s.openai_chat.jsonl", lines)
    (only,) = read_agents(tmp_path, "a").requests
    assert only.num_tokens == 257 and only.chunks == (0, 1)
    assert read_trace(tmp_path).requests == (only,)


def test_larger_chunks_are_named_by_their_last_part() -> None:
    trace = chained("two", 10, [(75, "abcdefg"), (45, "abxd")])
    larger = in_chunks(trace, 25)
    assert larger.chunk_tokens == 30
    assert [request.chunks for request in larger.requests] == [
        (trace.requests[0].chunks[2], trace.requests[0].chunks[5]),
        (trace.requests[1].chunks[2],),
    ]
    assert in_chunks(trace, 8) is trace


def test_sizes_without_a_plan_are_percentages_of_the_trace(trace: Path) -> None:
    result = run_simulate(trace)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(
        "trace.jsonl: 60 requests, 313,200 tokens, chunks of 512 tokens; the states of a boundary"
    )
    assert [line.split()[0] for line in lines[3:]] == ["5", "10", "30", "100"]
    report = json.loads(run_simulate(trace, "--json").stdout)
    rates = [row["hit_rate"] for row in report["rows"]]
    assert all(rate["ends"] <= rate["planner"] <= rate["attention"] for rate in rates)
    assert rates[-1]["attention"] == pytest.approx(40 * 8 * 512 / 313_200)
    assert rates[-1]["planner"] > rates[-1]["ends"] == 0


def test_a_plan_gives_the_sizes_of_the_model(trace: Path, tmp_path: Path) -> None:
    report = json.loads(run_simulate(trace, "--plan", "-", "--json", stdin=plan(1024, 512 << 10)).stdout)
    assert (report["chunk_tokens"], report["state_chunks"]) == (1024, 0.5)
    assert [row["size"] for row in report["rows"]] == ["4 MiB", "8 MiB", "16 MiB", "32 MiB", "64 MiB", "128 MiB"]
    document = tmp_path / "plan.json"
    document.write_text(plan(128, 0))
    result = run_simulate(trace, "--plan", str(document), "--capacity", "1GiB", "--capacity", "64MiB")
    assert result.stdout.splitlines()[2].split() == ["host", "memory", "of", "the", "trace", "hit", "rate"]
    assert [line.split()[0] for line in result.stdout.splitlines()[3:]] == ["64", "1"]


def test_the_chart_is_xml_and_names_the_sizes(trace: Path, tmp_path: Path) -> None:
    svg = tmp_path / "chart.svg"
    assert run_simulate(trace, "--svg", str(svg)).exit_code == 0
    texts = {element.text for element in ElementTree.fromstring(svg.read_text()).iter()}
    assert {"trace.jsonl: token hit rate", "the planner", "5 %", "100 %"} <= texts


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ": expected JSON lines|got no prompt"),
        ('{"timestamp": 1, "input": "abcd"}\n\n \n{', ":4: expected JSON lines|property name"),
        ('{"timestamp": 1, "prompt": "a"}', ":1: expected|got an object with timestamp, prompt"),
        ('{"timestamp": 1, "hash_ids": [1]}', ":1: expected|got no positive input_length"),
        ('{"timestamp": 1, "input_length": -10, "hash_ids": []}', ":1: expected|got no positive input_length"),
        ('{"timestamp": 1, "input_length": 512, "hash_ids": [1, 2]}', ":1: expected|2 hash_ids for 512 tokens"),
        ('{"timestamp": 1, "input_length": 512, "hash_ids": [[1]]}', ":1: expected|no list of hash_ids"),
        (
            '{"timestamp": 1, "input": "abcd"}\n{"timestamp": 2, "input_length": 512, "hash_ids": [1]}',
            ": expected JSON lines|got lines of both formats",
        ),
        ('{"timestamp": 1, "input": [{"role": "user"}]}', ":1: expected|got an object with timestamp, input"),
        ('{"timestamp": 1, "input": "ab"}', ": expected JSON lines|got no prompt"),
        ("[1]", ":1: expected|got a list"),
    ],
)
def test_a_trace_in_another_format_is_refused(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(content)
    result = run_simulate(file)
    assert result.exit_code == 2
    assert all(f"other.jsonl{part}" in result.stderr or part in result.stderr for part in words.split("|")), (
        result.stderr
    )


def test_invalid_options_are_refused(trace: Path) -> None:
    assert "--plan: expected the sizes of the model" in run_simulate(trace, "--capacity", "1GiB").stderr
    refused = run_simulate(trace, "--plan", '{"startup": 1}')
    assert refused.exit_code == 2 and "expected the document of hybridkv plan --json" in refused.stderr
    bad = run_simulate(trace, "--plan", plan(128, 0), "--capacity", "4 gigs")
    assert bad.exit_code == 2 and "--capacity: expected a unit among" in bad.stderr
    assert "expected a readable file" in run_simulate(trace.parent / "none").stderr
