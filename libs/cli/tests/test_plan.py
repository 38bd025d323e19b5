"""`hybridkv plan` without an engine: its refusals and its text. //tests/e2e compares it with the log of engines."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hybridkv.cli import engine_groups, planning
from hybridkv.cli.app import main
from hybridkv.cli.planning import PlanReport
from hybridkv.connectors.config import decode_config
from hybridkv.connectors.vllm.offload.startup_log import GroupReport, StartupReport, TierReport

RAM = {"type": "ram", "capacity": "4GiB"}
DISK = {"type": "disk", "path": "/var/cache/hybridkv", "capacity": "200GiB"}
PEER = {"type": "peer", "listen": "127.0.0.1:7300", "peers": ["10.0.0.2:7300"]}
OBJECT = {"type": "object", "url": "file:///mnt/store"}
STARTUP = StartupReport(
    groups=(
        GroupReport(0, "RECURRENT", 9, 128, 128 * 1000),
        GroupReport(1, "SCRATCH", 0, 64, 0),
        GroupReport(2, "FULL", 3, 128, 128 * 500),
    ),
    chunk_tokens=128,
    chunk_bytes=128 * 1500,
    tiers=(TierReport("ram", 4 << 30, 2_863_232, "ram 4 GiB"), TierReport("object", None, None, "object")),
    smallest_prompt_tokens=129,
    line="HybridOffloadConnector: groups 0 RECURRENT blocks of 128",
    notes=("HybridOffloadConnector: groups [1] are scratch and are not stored",),
    warnings=(),
)


def report(**fields: object) -> PlanReport:
    usual: dict[str, object] = {
        "model": "granite",
        "vllm": "0.32.0",
        "device": "cpu",
        "max_model_len": 8192,
        "ranks": 1,
        "startup": STARTUP,
        "bytes_per_token": planning._bytes_per_token(STARTUP),
        "unused_tiers": {},
        "warnings": [],
        "kv_transfer_config": planning.transfer_of(None),
    }
    return PlanReport(**usual | fields)  # type: ignore[arg-type]


def run_plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_the_error_without_vllm_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_groups, "find_spec", lambda name: None)
    result = run_plan(str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: vllm: expected an installed vLLM") and "pip install vllm" in result.stderr
    assert "vllm" not in sys.modules or result.exit_code == 2


def test_a_directory_without_a_model_configuration_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_groups, "find_spec", lambda name: object())
    for model in (str(tmp_path), "/none/here", "./none"):
        result = run_plan(model)
        assert result.exit_code == 2 and f"error: {model}: expected a directory with config.json" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tiers", "[{"], ["--tiers: expected a list in JSON"]),
        (["--tiers", "[]"], ["kv_connector_extra_config.tiers: expected a list of at least one tier"]),
        (["--tiers", json.dumps([RAM, {**DISK, "pth": "/x"}])], ["tiers[1].pth", 'did you mean "path"?']),
        (["--config", '{"kv_connector": "HybridNixlConnector"}'], ["kv_connector: expected HybridOffloadConnector"]),
        (["--config", "/none"], ["/none: expected a readable file"]),
        (["--config", "{}", "--tiers", "[]"], ["exclude each other"]),
    ],
)
def test_a_configuration_is_refused_before_vllm_is_loaded(
    options: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_groups, "plan_engine", lambda *_: pytest.fail("vLLM was loaded"))
    result = run_plan("model", *options)
    assert result.exit_code == 2
    for each in words:
        assert each in result.stderr


def test_options_of_vllm_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def plan(model: str, transfer: object, options: list[str]) -> PlanReport:
        given.extend([model, transfer, options])
        return report()

    monkeypatch.setattr(planning, "plan", plan)
    result = run_plan("granite", "--max-model-len", "8k", "--block-size", "32", "--enforce-eager", "-tp", "2", "--json")
    assert result.exit_code == 0, result.output
    assert given[0] == "granite"
    assert given[2] == [
        *("--block-size", "32", "--enforce-eager"),
        *("--max-model-len", "8k", "--tensor-parallel-size", "2"),
    ]
    document = json.loads(result.stdout)
    assert document["bytes_per_token"] == {"RECURRENT": 1000.0, "SCRATCH": 0.0, "FULL": 500.0}
    assert document["startup"]["line"] == STARTUP.line and document["kv_transfer_config"] == given[1]


def test_the_text_ends_with_the_option_to_paste() -> None:
    lines = planning.plan_text(report()).splitlines()
    assert lines[0] == "granite: max_model_len 8,192, 1 rank, vLLM 0.32.0 on cpu"
    assert [line.split() for line in lines[2:6]] == [
        ["group", "kind", "layers", "block", "tokens", "bytes", "a", "token"],
        ["0", "RECURRENT", "9", "128", "1,000"],
        ["1", "SCRATCH", "0", "64", "not", "stored"],
        ["2", "FULL", "3", "128", "500"],
    ]
    assert "tier ram                      holds 2,863,232 tokens" in lines
    assert lines[-1].startswith("--kv-transfer-config ")
    assert json.loads(shlex.split(lines[-1])[1]) == planning.transfer_of(None)
    assert lines[lines.index("An engine logs at its start:") + 2] == STARTUP.line


def test_warnings_are_shown_and_change_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "plan", lambda *_: report(warnings=list(planning._room_warnings(STARTUP, 1 << 24))))
    result = run_plan("granite")
    assert result.exit_code == 1
    assert "warning: host memory holds 8,589,678 tokens of one prompt, fewer than max_model_len" in result.stdout


@pytest.mark.parametrize(
    ("tiers", "role", "expected"),
    [
        ([RAM, DISK, PEER, OBJECT], "kv_both", {}),
        ([RAM, DISK, OBJECT], "kv_producer", {"disk": "stores only", "object": "stores only"}),
        ([RAM, PEER | {"peers": ["127.0.0.1:7300"]}], "kv_both", {"peer": "names no other engine"}),
        ([RAM, PEER | {"peers": [], "allowed_hosts": ["127.0.0.0/8"], "secret_file": "/secret"}], "kv_both", {}),
    ],
)
def test_unused_tiers_are_reported_with_the_reason(tiers: list[object], role: str, expected: dict[str, str]) -> None:
    config = decode_config({"tiers": tiers, "weights_digest": "model-1"})
    found = dict(planning._unused_tiers(config, role))
    assert found.keys() == expected.keys()
    assert all(words in found[name] for name, words in expected.items())
