"""Four engines at once over one server of LMCache, with prompts that share prefixes: each answers as one without it.

One of them is killed, which costs the others nothing. What it leaves in shared memory the next engine removes.
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
    """One engine. What it is told it does in order; `heard` waits for the answer to the first that has none yet."""

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

    def heard(self) -> Any:
        line = self._answers.readline()
        assert line, self.log.read_text(errors="replace")[-8000:]
        return json.loads(line)

    def results(self) -> list[Result]:
        return [Result.from_json(each) for each in self.heard()]

    def segments(self) -> set[Path]:
        """What it has in shared memory. It lives."""
        return segments_of(self.process.pid)

    def end(self) -> int:
        """Its exit status, when it has ended by itself: nobody tells it anything any more."""
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
    """Two of each stem."""
    chunk = CHUNK_TOKENS[kind]
    stems = [make_prompt(2 * chunk, seed=100 + i) for i in range(NUM_STEMS)]
    return [make_prompt(3 * chunk + 40, seed=i, prefix=stems[i % NUM_STEMS]) for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def alone(kind: str, directory: Path, prompts: list[list[int]]) -> list[Result]:
    """What an engine without a connector answers, which remembers nothing."""
    results = []
    with harness.running_engine(kind, directory / "alone", **ENGINE_ARGUMENTS.get(kind, {})) as engine:
        for prompt in prompts:
            results += engine.generate([prompt])
            engine.reset_prefix_cache()
    return results


@pytest.fixture(scope="module")
def engines(site: LMCacheSite, kind: str, directory: Path) -> Iterator[list[EngineProcess]]:
    """All serve, and two at a time were started."""
    running: list[EngineProcess] = []
    try:
        for pair in range(NUM_ENGINES // 2):
            running += [EngineProcess(kind, directory / f"{pair}-{i}", site.transfer()) for i in range(2)]
            for engine in running[-2:]:
                assert engine.heard() == "ready"
        yield running
    finally:
        for engine in running:
            engine.kill()


def order(number: int) -> list[int]:
    """In which each engine asks: none begins with what another begins with."""
    return [(number * NUM_PROMPTS // NUM_ENGINES + i) % NUM_PROMPTS for i in range(NUM_PROMPTS)]


def at_once(
    engines: Sequence[EngineProcess], prompts: Sequence[Sequence[int]], alone: Sequence[Result]
) -> list[list[int]]:
    """What each of them found cached. Its answers are those of one that is alone; afterwards it remembers nothing."""
    for number, engine in enumerate(engines):
        engine.tell("answer", prompts=[prompts[i] for i in order(number)])
        engine.tell("forget")
    cached = []
    for number, engine in enumerate(engines):
        results = engine.results()
        assert engine.heard() is True, "a store has no answer"
        require_same_output([alone[i] for i in order(number)], results)
        cached.append([result.num_cached_tokens for result in results])
    return cached


def test_each_answers_as_one_that_is_alone(
    engines: list[EngineProcess], site: LMCacheSite, prompts: list[list[int]], alone: list[Result], kind: str
) -> None:
    first = at_once(engines, prompts, alone)
    assert all(cached[0] == 0 for cached in first), "nothing was stored before"
    assert eventually(site.is_quiet)
    second = at_once(engines, prompts, alone)
    assert second == [[3 * CHUNK_TOKENS[kind]] * NUM_PROMPTS] * NUM_ENGINES


def test_one_that_is_killed_costs_the_others_nothing_and_leaves_nothing_for_long(
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
    # What it left any process on this machine may have removed already that began since.
    following = EngineProcess(kind, directory / "following", site.transfer())
    engines[0] = following
    assert following.heard() == "ready"
    assert not any(path.exists() for path in left) and all(engine.segments() for engine in others)
    following.tell("answer", prompts=prompts)
    results = following.results()
    require_same_output(alone, results)
    assert [result.num_cached_tokens for result in results] == [3 * CHUNK_TOKENS[kind]] * NUM_PROMPTS
    shared = {path for engine in engines for path in engine.segments()}
    assert [engine.end() for engine in engines] == [0] * NUM_ENGINES
    assert not any(path.exists() for path in shared)
