"""`hybridkv doctor` checks the machine and the media of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from hybridkv.cli.app import main


def findings(*tiers: object) -> list[dict[str, Any]]:
    extra = {"tiers": [{"type": "ram", "capacity": "1GiB"}, *tiers], "weights_digest": "model-1"}
    config = {"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    result = CliRunner().invoke(main, ["doctor", json.dumps(config), "--json"])
    assert not result.stderr, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    statuses = {each["status"] for each in found}
    assert result.exit_code == (2 if "fail" in statuses else 1 if "warn" in statuses else 0)
    return found


def test_a_disk_and_a_store_in_a_directory_are_tried(tmp_path: Path) -> None:
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


def test_without_a_configuration_the_machine_alone_is_checked() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert "Python: " in result.stdout and "disk" not in result.stdout
