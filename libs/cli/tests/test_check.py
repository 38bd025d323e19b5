"""`hybridkv check` reports what the engine's decoders refuse, and warns of settings that an engine accepts silently."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import patience
import pytest
from click.testing import CliRunner, Result

from hybridkv.cli.app import main

RAM = {"type": "ram", "capacity": "4GiB"}
DISK = {"type": "disk", "path": "/var/cache/hybridkv", "capacity": "200GiB"}
OBJECT = {"type": "object", "url": "file:///mnt/store", "secret_file": "/etc/hybridkv.secret"}


def transfer(extra: object, **more: Any) -> dict[str, Any]:
    fields = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return fields | more


MULTI = {
    "kv_connector": "HybridMultiConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": [transfer({"chunk_token": 1})]},
}


def run_check(config: object, *options: str) -> Result:
    text = config if isinstance(config, str) else json.dumps(config)
    return CliRunner().invoke(main, ["check", text, *options])


@pytest.mark.parametrize("tiers", [[RAM], [RAM, DISK], [RAM, DISK, OBJECT]])
def test_a_valid_configuration_has_no_problem(tiers: list[object]) -> None:
    result = run_check(transfer({"tiers": tiers, "weights_digest": "model-1"}))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "no problem found: HybridOffloadConnector\n"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            transfer({"tiers": [{"type": "ram", "capacity": "4 gigs"}]}),
            ["kv_connector_extra_config.tiers[0].capacity", "got '4 gigs'", "hint: write bytes"],
        ),
        (transfer({"tiers": [RAM, {**DISK, "pth": "/x"}]}), ["tiers[1].pth", 'did you mean "path"?']),
        (transfer({"tiers": [DISK]}), ["kv_connector_extra_config.tiers"]),
        (transfer({}, kv_role="both"), ["kv_role", '"kv_both"']),
        (transfer({}, kv_rolle="kv_both"), ["kv_rolle", 'did you mean "kv_role"?']),
        (transfer({}, tiers=[RAM]), ["tiers: expected a known key, got an unknown one", "put it into"]),
        (transfer([]), ["kv_connector_extra_config: expected an object"]),
        (
            MULTI,
            ["connectors[0].kv_connector_extra_config.chunk_token", 'did you mean "chunk_tokens"?'],
        ),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [MULTI]},
            },
            [
                "kv_connector_extra_config.connectors[0].kv_connector_extra_config.connectors[0].kv_connector_extra_config"
                ".chunk_token:",
                'did you mean "chunk_tokens"?',
            ],
        ),
        (
            {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
            | {
                "kv_connector_extra_config": {"connectors": [{**MULTI, "kv_connector_extra_config": {"connector": []}}]}
            },
            ["kv_connector_extra_config.connectors[0].kv_connector_extra_config.connector:"],
        ),
        (
            {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
            | {"kv_connector_extra_config": {"connectors": [{**MULTI, "kv_connector_extra_config": [1]}]}},
            ["kv_connector_extra_config.connectors[0].kv_connector_extra_config: expected an object, got [1]"],
        ),
        (
            {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
            | {"kv_connector_extra_config": {"connectors": [transfer(3)]}},
            ["kv_connector_extra_config.connectors[0].kv_connector_extra_config: expected an object, got 3"],
        ),
        ("{", ["the argument: expected JSON"]),
        ("[1]", ["[1]: expected a readable file"]),
    ],
)
def test_a_refused_setting_is_an_error_with_its_path_and_a_hint(config: object, words: list[str]) -> None:
    result = run_check(config)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    for each in words:
        assert each in result.stderr


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (
            {k: v for k, v in transfer({"tiers": [RAM]}).items() if k != "kv_load_failure_policy"},
            "kv_load_failure_policy",
        ),
        (transfer({"tiers": [RAM, {**DISK, "capacity": "1GiB"}]}), "kv_connector_extra_config.tiers[1].capacity"),
        (transfer({"tiers": [RAM, OBJECT, DISK], "weights_digest": "model-1"}), "kv_connector_extra_config.tiers[1]"),
        (transfer({"tiers": [RAM]}, kv_role="kv_producer"), "kv_role"),
        (transfer({"tiers": [RAM]}, kv_connector="NixlConnector"), "kv_connector"),
    ],
)
def test_a_doubtful_setting_is_a_warning(config: object, path: str) -> None:
    result = run_check(config, "--json")
    problems = json.loads(result.stdout)["problems"]
    assert [(each["severity"], each["path"]) for each in problems] == [("warning", path)]


def test_a_configuration_comes_from_a_file_or_from_stdin(tmp_path: Path) -> None:
    text = json.dumps(transfer({"tiers": [RAM]}))
    file = tmp_path / "transfer.json"
    file.write_text(text)
    assert run_check(str(file)).exit_code == 0
    assert CliRunner().invoke(main, ["check", "-"], input=text).exit_code == 0
    assert f"{tmp_path}/none: expected a readable file" in run_check(f"{tmp_path}/none").stderr


def test_json_has_the_same_findings() -> None:
    result = run_check(transfer({"tiers": [{"type": "ram"}]}), "--json")
    assert result.exit_code == 2
    [problem] = json.loads(result.stdout)["problems"]
    assert problem["path"] == "kv_connector_extra_config.tiers[0].capacity" and problem["hint"]


def test_the_command_imports_neither_torch_nor_vllm() -> None:
    config = json.dumps(transfer({"tiers": [RAM]}))
    program = "\n".join(
        [
            "import atexit, sys",
            "atexit.register(lambda: print(sorted({'torch', 'vllm'} & set(sys.modules))))",
            "from hybridkv.cli.app import main",
            f"main(['check', {config!r}])",
        ]
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=patience.seconds(30)
    )
    assert ran.stdout.splitlines()[-1] == "[]", ran.stderr
