"""The examples of deploy/, as the programs that read them see them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dockerfile_parse
import yaml

DEPLOY = Path(__file__).absolute().parents[2] / "deploy"
CONTAINER = DEPLOY / "container/Containerfile"
KUBERNETES = DEPLOY / "kubernetes/vllm-hybridkv.yaml"
SYSTEMD = DEPLOY / "systemd/vllm-hybridkv.service"


def instructions() -> list[tuple[str, str]]:
    """Instructions of the container file with their values."""
    parser = dockerfile_parse.DockerfileParser(fileobj=CONTAINER.open("rb"))
    return [(entry["instruction"], entry["value"]) for entry in parser.structure if entry["instruction"] != "COMMENT"]


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8")))


def pod() -> dict[str, Any]:
    """The pod of the stateful set."""
    [found] = [manifest for manifest in manifests() if manifest["kind"] == "StatefulSet"]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def unit() -> dict[str, dict[str, str]]:
    """Sections of the unit. A backslash at the end of a line becomes a blank, as systemd.syntax(7) says."""
    lines = [line for line in SYSTEMD.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    sections: dict[str, dict[str, str]] = {}
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = sections.setdefault(header[1], {})
        elif line:
            key, _, value = line.partition("=")
            assert key not in section
            section[key] = value
    return sections


def command_lines() -> dict[str, list[str]]:
    """The command that each example starts, split as it is split there."""
    [entry_point] = [value for instruction, value in instructions() if instruction == "ENTRYPOINT"]
    [container] = pod()["containers"]
    start = unit()["Service"]["ExecStart"]
    assert not re.search(r"[\\%$]", start), "systemd would expand these"
    return {
        "container": [*json.loads(entry_point), "/models/MODEL"],
        "kubernetes": container["command"],
        "systemd": shlex.split(start),
    }


def option(command: Sequence[str], name: str) -> str:
    """Value of an option that the command has exactly once."""
    found = [command[i + 1] for i, word in enumerate(command) if word == name]
    found += [word.partition("=")[2] for word in command if word.startswith(f"{name}=")]
    [value] = found
    return value
