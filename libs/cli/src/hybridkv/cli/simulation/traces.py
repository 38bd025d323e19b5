"""Traces of requests. A prompt is a list of numbers, one for each prefix that ends with a chunk."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hybridkv.cli.output import ReportError
from hybridkv.connectors.errors import SettingProblem

MOONCAKE_TOKENS: Final = 512
"""Tokens of one of Mooncake's hash ids."""
AGENT_TOKENS: Final = 128
CHARACTERS_PER_TOKEN: Final = 4
"""Number of characters that count as one token, in traces with text instead of token ids."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt.

    Args:
        num_tokens: length of the prompt; positive.
        chunks: for each whole chunk, a number that identifies the prompt up to the end of the chunk.
        answered: the same for prompt and answer together; empty if answers are not modelled.
    """

    num_tokens: int
    chunks: tuple[int, ...]
    answered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time."""

    name: str
    chunk_tokens: int
    requests: tuple[TraceRequest, ...]


def chained(name: str, chunk_tokens: int, prompts: Iterable[tuple[int, Iterable[Hashable]]]) -> Trace:
    """Makes a trace. `prompts` has, for each prompt, its length in tokens and the content of its whole chunks. Equal
    content after equal prefixes gets the same number."""
    numbers: dict[tuple[int, Hashable], int] = {}
    requests = []
    for num_tokens, contents in prompts:
        chunks: list[int] = []
        for content in contents:
            before = chunks[-1] if chunks else -1
            chunks.append(numbers.setdefault((before, content), len(numbers)))
        requests.append(TraceRequest(num_tokens, tuple(chunks)))
    return Trace(name, chunk_tokens, tuple(requests))


def in_chunks(trace: Trace, chunk_tokens: int) -> Trace:
    """The trace in chunks of the smallest multiple of its own chunk with at least `chunk_tokens` tokens."""
    factor = -(-chunk_tokens // trace.chunk_tokens)
    if factor <= 1:
        return trace
    requests = (
        TraceRequest(request.num_tokens, request.chunks[factor - 1 :: factor], request.answered[factor - 1 :: factor])
        for request in trace.requests
    )
    return Trace(trace.name, trace.chunk_tokens * factor, tuple(requests))


def read_mooncake(path: Path, name: str) -> Trace:
    """Reads a trace of Mooncake (FAST25): lines with `timestamp`, `input_length` and `hash_ids` of 512 tokens each."""
    return _from_hashes(name, _lines([path]))


def read_agents(folder: Path, name: str) -> Trace:
    """Reads LMCache's agent traces: files of lines with `timestamp` and `input`. Sorts all sessions together by time.

    Lines without a prompt are left out.
    """
    return _from_text(name, _lines(sorted(folder.glob("*.jsonl"))))


def read_trace(path: Path) -> Trace:
    """Reads a trace of either format: a file, or all *.jsonl files of a folder.

    Raises:
        OSError: a file cannot be read.
        ReportError: the lines have another format.
    """
    lines = _lines(sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
    has_hashes = bool(lines) and "hash_ids" in lines[0]
    if any(("hash_ids" in line) != has_hashes for line in lines):
        raise _refused(str(path), "lines of both formats")
    trace = (_from_hashes if has_hashes else _from_text)(path.name, lines)
    if not trace.requests:
        raise _refused(str(path), "no prompt")
    return trace


def _refused(place: str, got: str) -> ReportError:
    expected = "JSON lines with timestamp, input_length and hash_ids, or with timestamp and input"
    return ReportError(SettingProblem("error", place, expected, got, "see libs/cli/README.md, hybridkv simulate"))


def _lines(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All lines of the files, in order of time.

    Raises:
        ReportError: a line has neither of the two formats.
    """
    lines = []
    for file in files:
        with file.open(encoding="utf-8") as text:
            for number, line in enumerate(text, 1):
                if not line.strip():
                    continue
                place = f"{file}:{number}"
                try:
                    found = json.loads(line)
                except json.JSONDecodeError as error:
                    raise _refused(place, str(error)) from None
                if (why := _misfit(found)) is not None:
                    raise _refused(place, why)
                lines.append(found)
    lines.sort(key=lambda line: line["timestamp"])
    return lines


def _misfit(line: Any) -> str | None:
    """Reason why a line has neither of the two formats; None if it has one."""
    if not isinstance(line, dict):
        return f"a {type(line).__name__}"
    if not isinstance(line.get("timestamp"), int | float):
        return "no timestamp"
    if "hash_ids" in line:
        num_tokens, ids = line.get("input_length"), line["hash_ids"]
        is_list = isinstance(ids, list) and all(isinstance(each, int | str) for each in ids)
        if not isinstance(num_tokens, int) or num_tokens <= 0 or not is_list:
            return "no positive input_length, or no list of hash_ids"
        if len(ids) != -(-num_tokens // MOONCAKE_TOKENS):
            return f"{len(ids)} hash_ids for {num_tokens} tokens; each stands for {MOONCAKE_TOKENS}"
        return None
    return None if isinstance(line.get("input"), str) else f"an object with {', '.join(line) or 'nothing'}"


def _from_hashes(name: str, lines: Iterable[Mapping[str, Any]]) -> Trace:
    prompts = [(line["input_length"], line["hash_ids"][: line["input_length"] // MOONCAKE_TOKENS]) for line in lines]
    return chained(name, MOONCAKE_TOKENS, prompts)


def _from_text(name: str, lines: Iterable[Mapping[str, Any]]) -> Trace:
    def prompts() -> Iterator[tuple[int, list[str]]]:
        size = AGENT_TOKENS * CHARACTERS_PER_TOKEN
        for line in lines:
            text, num_tokens = line["input"], len(line["input"]) // CHARACTERS_PER_TOKEN
            if num_tokens:
                ends = range(size, num_tokens * CHARACTERS_PER_TOKEN + 1, size)
                yield num_tokens, [text[end - size : end] for end in ends]

    return chained(name, AGENT_TOKENS, prompts())
