"""One engine in its own process that answers a few prompts and ends, and its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import patience

LIFE_S = patience.seconds(80.0)


@dataclass(frozen=True, slots=True)
class Life:
    """The results and the log of a process."""

    results: list[dict[str, Any]]
    log: str

    @property
    def cached(self) -> list[int]:
        return [result["cached"] for result in self.results]

    @property
    def outputs(self) -> list[Any]:
        return [(result["tokens"], result["logprobs"]) for result in self.results]


def one_life(
    main: Callable[[Sequence[str]], None],
    kind: str,
    directory: Path,
    *more: str,
    environment: Mapping[str, str] = forked.NOTHING,
    status: int = 0,
) -> Life:
    """Run a process that writes results to the file of `--output`, and require its exit status."""
    output = directory / "results.json"
    output.unlink(missing_ok=True)
    arguments = ["--kind", kind, "--directory", str(directory), "--output", str(output), *more]
    ended, log = forked.run(main, arguments, log=directory / "log.txt", within_s=LIFE_S, environment=environment)
    assert ended == status, log
    return Life(json.loads(output.read_text()), log)
