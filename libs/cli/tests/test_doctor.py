"""`hybridkv doctor` checks the machine and the media of a configuration."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hybridkv.cli.app import main
from hybridkv.peers.transport import nixl_library


def findings(*tiers: object) -> list[dict[str, Any]]:
    extra = {"tiers": [{"type": "ram", "capacity": "1GiB"}, *tiers], "weights_digest": "model-1"}
    config = {"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    result = CliRunner().invoke(main, ["doctor", json.dumps(config), "--json"])
    assert not result.stderr, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    statuses = {each["status"] for each in found}
    assert result.exit_code == (2 if "fail" in statuses else 1 if "warn" in statuses else 0)
    return found


def test_a_disk_and_an_object_directory_are_tried(tmp_path: Path) -> None:
    store = tmp_path / "objects"
    store.mkdir(mode=0o700)
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "1GiB"}
    found = findings(disk, {"type": "object", "url": f"file://{store}"})
    by_name = {(each["name"], each["status"]) for each in found}
    assert (f"object store file://{store}", "ok") in by_name
    assert any("fsync takes" in each["words"] for each in found)
    assert ("hybridkv.native", "ok") in by_name
    assert [path.name for path in tmp_path.iterdir()] == ["objects"]


def test_a_disk_without_a_parent_fails(tmp_path: Path) -> None:
    found = findings({"type": "disk", "path": str(tmp_path / "none" / "disk"), "capacity": "1GiB"})
    assert [each["status"] for each in found if each["name"].startswith("disk ")] == ["fail"]


def run_doctor(connector: str, extra: dict[str, Any]) -> list[tuple[str, str]]:
    config = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    result = CliRunner().invoke(main, ["doctor", json.dumps(config), "--json"])
    assert not result.stderr, result.stderr
    return [(each["status"], each["name"]) for each in json.loads(result.stdout)]


def test_an_lmcache_server_is_tried_also_below_a_multi_connector() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening, so it refuses
        port, http_port = listening.getsockname()[1], closed.getsockname()[1]
        extra: dict[str, Any] = {"url": f"tcp://127.0.0.1:{port}", "http_port": http_port}
        name = "HybridLMCacheConnector"
        found = run_doctor(name, extra)
        assert ("ok", f"LMCache's server at 127.0.0.1:{port}") in found
        assert ("fail", f"LMCache's server at 127.0.0.1:{http_port}") in found
        child = {"kv_connector": name, "kv_connector_extra_config": extra | {"chunk_tokens": 256}}
        found = run_doctor("HybridMultiConnector", {"connectors": [child]})
        assert ("warn", f"LMCache's server at 127.0.0.1:{http_port}") in found


def test_the_secret_of_peers_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_library, "require_nixl", lambda: None)  # NIXL is not installed here
    secret = tmp_path / "secret"
    assert ("fail", "peers") in run_doctor("HybridNixlConnector", {"secret_file": str(secret)})
    secret.write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    assert ("fail", "peers") not in run_doctor("HybridNixlConnector", {"secret_file": str(secret)})


def test_a_configuration_that_an_engine_refuses_is_an_error() -> None:
    result = CliRunner().invoke(main, ["doctor", '{"kv_connector": "HybridNixlConnector", "kv_role": "both"}'])
    assert result.exit_code == 2 and 'kv_role: expected one of "kv_both"' in result.stderr


def test_only_the_machine_is_checked_without_a_configuration() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert "Python: " in result.stdout and "disk" not in result.stdout
