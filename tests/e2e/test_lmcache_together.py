"""Four concurrent engines on one LMCache server with shared prefixes give the answers of an engine without a server.

Killing one does not affect the others. The next engine removes the shared memory that it left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import lmcache_process
import patience
import pytest
from equality import require_same_output
from harness import Result, make_prompt
from lmcache_site import CHUNK_TOKENS, ENGINE_ARGUMENTS, LMCacheSite

from kits.lmcache.segments import segments_of
from kits.lmcache.server_process import eventually

NUM_ENGINES = 4
NUM_STEMS = 4
NUM_PROMPTS = 8
END_S = patience.seconds(12.0)


class EngineProcess:
    """One engine. It executes commands in order; `heard` waits for the oldest missing answer."""

    def __init__(self, kind: str, directory: Path, transfer: dict[str, Any]) -> None:
        directory.mkdir(parents=True)
        self.log = directory / "log.txt"
        ours, theirs = os.pipe()
        given = {"kind": kind, "directory": directory, "answers": theirs, "transfer": json.dumps(transfer)}
        given["arguments"] = json.dumps(ENGINE_ARGUMENTS.get(kind, {}))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, lmcache_process.__file__, *(f"--{name}={value}" for name, value in given.items())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
            )
        os.close(theirs)
        self._answers = os.fdopen(ours)

    def tell(self, do: str, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
        self.process.stdin.flush()

    def next_answer(self) -> Any:
        line = self._answers.readline()
        assert line, self.log.read_text(errors="replace")[-8000:]
        return json.loads(line)

    def results(self) -> list[Result]:
        return [Result.from_json(each) for each in self.next_answer()]

    def segments(self) -> set[Path]:
        """Its segments in shared memory. It must be running."""
        return segments_of(self.process.pid)

    def end(self) -> int:
        """Close the command pipe, and return the exit status of the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        return self.process.wait(END_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._answers.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.scratch_directory(tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module")
def prompts(kind: str) -> list[list[int]]:
    """Two prompts for each stem."""
    chunk = CHUNK_TOKENS[kind]
    stems = [make_prompt(2 * chunk, seed=100 + i) for i in range(NUM_STEMS)]
    return [make_prompt(3 * chunk + 40, seed=i, prefix=stems[i % NUM_STEMS]) for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def alone(kind: str, directory: Path, prompts: list[list[int]]) -> list[Result]:
    """Results of an engine without a connector and without cached prefixes."""
    results = []
    with harness.running_engine(kind, directory / "alone", **ENGINE_ARGUMENTS.get(kind, {})) as engine:
        for prompt in prompts:
            results += engine.generate([prompt])
            engine.reset_prefix_cache()
    return results


@pytest.fixture(scope="module")
def engines(site: LMCacheSite, kind: str, directory: Path) -> Iterator[list[EngineProcess]]:
    """All engines, running. Two were started at a time."""
    running: list[EngineProcess] = []
    try:
        for pair in range(NUM_ENGINES // 2):
            running += [EngineProcess(kind, directory / f"{pair}-{i}", site.transfer()) for i in range(2)]
            for engine in running[-2:]:
                assert engine.next_answer() == "ready"
        yield running
    finally:
        for engine in running:
            engine.kill()


def order(number: int) -> list[int]:
    """The order of prompts at an engine. No two engines begin with the same prompt."""
    return [(number * NUM_PROMPTS // NUM_ENGINES + i) % NUM_PROMPTS for i in range(NUM_PROMPTS)]


def at_once(
    engines: Sequence[EngineProcess], prompts: Sequence[Sequence[int]], alone: Sequence[Result]
) -> list[list[int]]:
    """Run all engines concurrently, and return the cached tokens. Answers equal those of the engine alone; caches are
    reset afterwards.
    """
    for number, engine in enumerate(engines):
        engine.tell("answer", prompts=[prompts[i] for i in order(number)])
        engine.tell("forget")
    cached = []
    for number, engine in enumerate(engines):
        results = engine.results()
        assert engine.next_answer() is True, "a store has no answer"
        require_same_output([alone[i] for i in order(number)], results)
        cached.append([result.num_cached_tokens for result in results])
    return cached


def test_concurrent_engines_answer_like_an_engine_alone(
    engines: list[EngineProcess], site: LMCacheSite, prompts: list[list[int]], alone: list[Result], kind: str
) -> None:
    first = at_once(engines, prompts, alone)
    assert all(cached[0] == 0 for cached in first), "the server was empty before"
    assert eventually(site.is_quiet)
    second = at_once(engines, prompts, alone)
    assert second == [[3 * CHUNK_TOKENS[kind]] * NUM_PROMPTS] * NUM_ENGINES


def test_a_killed_engine_does_not_affect_others_and_is_cleaned_up(
    engines: list[EngineProcess],
    site: LMCacheSite,
    prompts: list[list[int]],
    alone: list[Result],
    kind: str,
    directory: Path,
) -> None:
    killed, *others = engines
    left = killed.segments()
    assert left
    killed.tell("answer", prompts=prompts)
    for engine in others:
        engine.tell("answer", prompts=prompts)
    killed.kill()
    for engine in others:
        require_same_output(alone, engine.results())
    # Any process of this machine that began since then may have removed them already.
    following = EngineProcess(kind, directory / "following", site.transfer())
    engines[0] = following
    assert following.next_answer() == "ready"
    assert not any(path.exists() for path in left) and all(engine.segments() for engine in others)
    following.tell("answer", prompts=prompts)
    results = following.results()
    require_same_output(alone, results)
    assert [result.num_cached_tokens for result in results] == [3 * CHUNK_TOKENS[kind]] * NUM_PROMPTS
    shared = {path for engine in engines for path in engine.segments()}
    assert [engine.end() for engine in engines] == [0] * NUM_ENGINES
    assert not any(path.exists() for path in shared)
