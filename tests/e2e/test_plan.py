"""`hybridkv plan` says before the start what the engine logs at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
from plans import planned, start_lines

import tiny_models


def test_the_plan_is_what_the_engine_logs_at_its_start(
    kind: str, kv_transfer_config: dict[str, Any], tmp_path_factory: Any
) -> None:
    directory: Path = harness.scratch_directory(tmp_path_factory.mktemp("plan"))
    harness.prepare_environment(directory / "environment")
    model = tiny_models.make_tiny_model(kind, directory / kind)
    disk = {"type": "disk", "path": str(directory / "cache"), "capacity": "1GiB"}
    extra = kv_transfer_config["kv_connector_extra_config"]
    transfer = kv_transfer_config | {"kv_connector_extra_config": extra | {"tiers": [*extra["tiers"], disk]}}
    arguments = tiny_models.ENGINE_ARGUMENTS[kind]
    startup = planned(model, arguments, transfer).startup
    with start_lines() as lines, harness.running_model(model, arguments | {"kv_transfer_config": transfer}):
        pass
    [line] = [line for line in lines if "groups 0 " in line]
    assert line.rpartition("; cache ")[0] == startup.line
    assert "disk 1 GiB at" in line
    assert [line for line in lines if line in startup.warnings] == list(startup.warnings)
    assert len(startup.warnings) == 1 and "shutdown_timeout" in startup.warnings[0]
