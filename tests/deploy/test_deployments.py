"""The examples of deploy/ parse, and their numbers fit together."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest
from deployments import SYSTEMD, command_lines, instructions, manifests, option, pod, unit

from hybridkv.connectors.checking import CheckReport, check, parse_transfer
from hybridkv.connectors.config import DiskTierConfig, OffloadConfig, decode_config

COMMANDS = command_lines()
MARGIN_S = 10
"""Between the last answer and the end of the engine."""
each_example = pytest.mark.parametrize("example", COMMANDS)


def transfer(example: str) -> dict[str, Any]:
    return parse_transfer(option(COMMANDS[example], "--kv-transfer-config"), example)


def offload_config(example: str) -> OffloadConfig:
    return decode_config(transfer(example)["kv_connector_extra_config"])


def disk_of(example: str) -> DiskTierConfig:
    found = offload_config(example).disk
    assert found is not None
    return found


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity in Gi."""
    found = re.fullmatch(r"(\d+)Gi", text)
    assert found is not None
    return int(found[1]) << 30


def volumes() -> dict[str, dict[str, Any]]:
    return {volume["name"]: volume for volume in pod()["volumes"]}


def mounts() -> dict[str, str]:
    [container] = pod()["containers"]
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


@each_example
def test_the_engines_decoder_has_nothing_against_it(example: str) -> None:
    assert check(transfer(example)) == CheckReport(["HybridOffloadConnector"], [])


@each_example
def test_the_decoder_refuses_it_with_a_mistake(example: str) -> None:
    """Control: the check above reads the tiers."""
    broken = option(COMMANDS[example], "--kv-transfer-config").replace("GiB", " gigs", 1)
    [problem] = check(parse_transfer(broken, example)).problems
    assert (problem.severity, problem.path) == ("error", "kv_connector_extra_config.tiers[0].capacity")


@each_example
def test_it_starts_the_api_server_on_every_address(example: str) -> None:
    command = COMMANDS[example]
    assert [Path(command[0]).name, command[1]] == ["vllm", "serve"]
    assert (option(command, "--host"), option(command, "--port")) == ("0.0.0.0", "8000")


@each_example
def test_the_supervisor_waits_longer_than_the_server(example: str) -> None:
    drain_s = int(option(COMMANDS[example], "--shutdown-timeout"))
    assert drain_s > MARGIN_S
    if example == "kubernetes":
        [container] = pod()["containers"]
        pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod()["terminationGracePeriodSeconds"] >= pause_s + drain_s + MARGIN_S
    elif example == "systemd":
        assert int(unit()["Service"]["TimeoutStopSec"]) >= drain_s + MARGIN_S
    else:
        assert drain_s + MARGIN_S <= 45, "docker run --stop-timeout 45, in its first lines"


def test_the_container_file_installs_from_the_wheelhouse() -> None:
    values = dict(instructions())
    installs = [value for instruction, value in instructions() if instruction == "RUN" and "pip install" in value]
    assert len(installs) == 1
    assert {"--mount=type=bind,target=/wheelhouse", "/wheelhouse", "hybridkv-vllm"} <= set(installs[0].split())
    assert values["ARG"] == "BASE=vllm/vllm-openai:v0.32.0"
    assert values["VOLUME"] == disk_of("container").path
    assert values["STOPSIGNAL"] == "SIGTERM"


def test_each_engine_of_kubernetes_has_a_volume_larger_than_its_disk_tier() -> None:
    [stateful] = [manifest for manifest in manifests() if manifest["kind"] == "StatefulSet"]
    [claim] = stateful["spec"]["volumeClaimTemplates"]
    disk = disk_of("kubernetes")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert quantity(claim["spec"]["resources"]["requests"]["storage"]) > disk.capacity
    assert str(Path(disk.path).parent) == mounts()[claim["metadata"]["name"]], "its root is not the tier's own"


def test_kubernetes_gives_memory_for_the_ram_tier_and_shared_memory() -> None:
    [container] = pod()["containers"]
    shared = volumes()["shared-memory"]["emptyDir"]
    assert (shared["medium"], mounts()["shared-memory"]) == ("Memory", "/dev/shm")
    limit = quantity(container["resources"]["limits"]["memory"])
    assert limit > offload_config("kubernetes").ram.capacity + quantity(shared["sizeLimit"])


def test_kubernetes_waits_for_the_weights_before_it_counts_failures() -> None:
    [container] = pod()["containers"]
    [port] = [entry["name"] for entry in container["ports"] if str(entry["containerPort"]) == "8000"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


@pytest.mark.parametrize("manifest", manifests(), ids=lambda manifest: manifest["kind"])
def test_kubernetes_knows_every_field_of_the_manifest(manifest: dict[str, Any]) -> None:
    getattr(kubernetes.client, f"V1{manifest['kind']}").model_validate(manifest)


@pytest.mark.parametrize(
    "wrong", [{"terminationGracePeriodSecond": 60}, {"terminationGracePeriodSeconds": "a minute"}, {"volumes": {}}]
)
def test_a_wrong_field_of_a_pod_is_found(wrong: dict[str, Any]) -> None:
    """Control: the models of the client are strict."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kubernetes.client.V1PodSpec.model_validate(pod() | wrong)


def verify(text: str, folder: Path) -> list[str]:
    """Complaints of systemd about the unit, with a program that exists here."""
    file = folder / SYSTEMD.name
    file.write_text(text.replace("ExecStart=/opt/vllm/bin/vllm ", f"ExecStart={sys.executable} "), encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(file)]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    return (finished.stdout + finished.stderr).splitlines()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on PATH")
def test_systemd_has_nothing_against_the_unit(tmp_path: Path) -> None:
    text = SYSTEMD.read_text(encoding="utf-8")
    assert verify(text, tmp_path) == []
    assert verify(text.replace("KillMode=mixed", "KillMod=mixed"), tmp_path) != [], "control"


def test_the_unit_kills_the_engine_last_and_makes_the_disks_directory() -> None:
    service = unit()["Service"]
    assert service["KillMode"] == "mixed"
    assert f"/var/cache/{service['CacheDirectory']}" == disk_of("systemd").path
    assert service["CacheDirectoryMode"] == "0700"
