"""The commands of the quickstart page, run in one shell in a fresh environment, print the output shown on the page.

The page's sessions are its `console` blocks: a command after `$`, continuation lines after `>`, then its stdout.
Numbers and cache names may differ, except the restored tokens printed by `hybridkv bench`; a line `...` matches any
lines. The environment has only the wheels and the packages beside them, no index.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import harness
import patience
import pytest
import server as servers
import wheels
from harness import record_engine_start

PAGE = Path(os.environ["HYBRIDKV_QUICKSTART"])
ROOT = PAGE.parents[2]
SCRATCH = "/tmp/hybridkv-demo"
DEADLINE_S = patience.seconds(60.0)
_MARK = "@@ "


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the page and the output shown for it."""

    command: str
    output: str


def steps() -> list[Step]:
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    typed = re.findall(r"^\$ (.*\n(?:>.*\n)*)((?:(?!\$ ).*\n)*)", "".join(blocks), re.M)
    return [Step(re.sub(r"^> ?", "", command, flags=re.M).strip(), output) for command, output in typed]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = harness.scratch_directory(tmp_path_factory.mktemp("quickstart"))
    harness.prepare_environment(scratch / "environment")
    (scratch / "tree/demo").mkdir(parents=True)
    for path in ("examples/tiny_models.py", "deploy/vllm/explain-logging.json"):
        (scratch / "tree" / path).parent.mkdir(parents=True)
        shutil.copyfile(ROOT / path, scratch / "tree" / path)
    return scratch


@pytest.fixture(scope="module")
def outputs(directory: Path) -> list[tuple[str, int]]:
    """Stdout and exit status of each command, with the test's directory replaced by the page's."""
    [distribution] = set(re.findall(r"^    pip install --find-links \S+ (\S+)$", PAGE.read_text(), re.M))
    wheelhouse = Path(os.environ["HYBRIDKV_WHEELHOUSE"]).resolve()
    python = wheels.install(wheelhouse, directory / "venv", distribution, beside=wheels.packages_beside("vllm"))
    demo, port = str(directory / "tree/demo"), str(servers.free_port())
    # With job control, as in an interactive shell: `kill %1`.
    script = "set -m\n"
    for step in steps():
        command = step.command.replace(SCRATCH, demo).replace("8000", port)
        script += f"{command}\nprintf '\\n{_MARK}%d\\n' $?\n"
    environment = wheels.outside_environment()
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    record_engine_start()
    with (directory / "stderr.log").open("wb") as errors:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=directory / "tree",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        stdout, _ = shell.communicate(timeout=DEADLINE_S)
    finally:
        end_session(shell.pid)
        for log in (directory / "stderr.log", directory / "tree/demo/server.log"):
            print(log.read_text() if log.exists() else f"no {log}")
    print(stdout)
    parts = re.split(rf"\n{_MARK}(\d+)\n", stdout.replace(demo, SCRATCH))
    return list(zip(parts[:-1:2], map(int, parts[1::2]), strict=True))


def end_session(leader: int) -> None:
    """Kill all processes of a session, including jobs of its shell."""
    for process in (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process) == leader:
                os.kill(process, signal.SIGKILL)


def masked(text: str) -> list[str]:
    """Lines without numbers, durations, cache names and column widths."""
    text = re.sub(r"\b[0-9a-f]{12}\b", "#", text.strip())
    text = re.sub(r"\b\d[\d.,:-]*( ms| s)?\b", "#", text)
    return [re.sub(r" +", " ", line) for line in text.splitlines()]


def test_each_command_prints_the_output_shown_on_the_page(outputs: list[tuple[str, int]]) -> None:
    shown = steps()
    assert [step.command for step in shown[len(outputs) :]] == []
    for step, (stdout, status) in zip(shown, outputs, strict=True):
        assert (step.command, status) == (step.command, 0)
        expected, printed = masked(step.output), masked(stdout)
        if expected[-1:] == ["..."]:
            expected.pop()
            printed = printed[: len(expected)]
        assert printed == expected, step.command


def test_the_page_shows_every_command_for_beginners() -> None:
    commands = "\n".join(step.command for step in steps())
    for name in ("check", "plan", "bench", "explain", "inspect", "verify", "clear"):
        assert f"hybridkv {name} " in commands
    assert "vllm.entrypoints.openai.api_server" in commands


def test_the_restored_tokens_match_the_page(outputs: list[tuple[str, int]]) -> None:
    [(shown, printed)] = [
        (step.output, stdout)
        for step, (stdout, _) in zip(steps(), outputs, strict=True)
        if step.command.startswith("hybridkv bench")
    ]
    assert last_column(printed) == last_column(shown) == [0, 1920, 1920]
    assert "A new prompt of 2,000 tokens takes " in printed


def last_column(table: str) -> list[int]:
    rows = re.findall(r"^(?:cold|again|restored)\b.* ([\d,]+)$", table, re.M)
    return [int(number.replace(",", "")) for number in rows]


def test_the_cleared_cache_is_empty(outputs: list[tuple[str, int]], directory: Path) -> None:
    assert [path.name for path in (directory / "tree/demo/cache").iterdir() if path.is_dir()] == []
