"""Reads traces of requests, as prefixes that can be told apart: what `reuse_traces.py` simulates."""

from __future__ import annotations

import enum
import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Final

MOONCAKE_TOKENS: Final = 512
"""Of one of Mooncake's hash ids."""
AGENT_TOKENS: Final = 128
CHARACTERS_PER_TOKEN: Final = 4
"""Of the agents' text, for which no tokenizer is at hand."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt.

    Args:
        num_tokens: its length; positive.
        chunks: of each whole chunk a number that stands for the prompt up to its end.
        answered: the same of the prompt and its answer together; empty where answers are not modelled.
    """

    num_tokens: int
    chunks: tuple[int, ...]
    answered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time."""

    name: str
    chunk_tokens: int
    requests: tuple[Request, ...]


class Part(enum.StrEnum):
    """What of a trace is run, by itself: with a store that is empty, and a planner that has learned nothing."""

    WHOLE = "whole"
    FIRST = "first half"
    SECOND = "second half"


def part_of(trace: Trace, part: Part) -> Trace:
    """The requests of a part."""
    middle = len(trace.requests) // 2
    taken = {Part.WHOLE: slice(None), Part.FIRST: slice(middle), Part.SECOND: slice(middle, None)}[part]
    return replace(trace, requests=trace.requests[taken])


def chats(num: int, turns: int, first: int, more: int, answer: int, *, keeps: int, chunk_tokens: int = 128) -> Trace:
    """Conversations in turn, with answers.

    Args:
        num: of conversations.
        turns: of each.
        first: tokens of what a user says first.
        more: tokens of what a user says later.
        answer: tokens of an answer.
        keeps: of these, the last ones, that stay in the history: fewer where a model's reasoning is dropped.
        chunk_tokens: of a chunk.
    """
    histories: list[list[int]] = [[] for _ in range(num)]
    fresh, contents = count(), []
    for turn in range(turns):
        for history in histories:
            history.extend(islice(fresh, first if turn == 0 else more))
            said, answered = tuple(history), tuple(islice(fresh, answer))
            contents += [(len(said), said), (len(said), said + answered[:-1])]  # the last token is never computed
            history.extend(answered[answer - keeps :])
    chunk = chunk_tokens
    prompts = [(n, [all_[e - chunk : e] for e in range(chunk, len(all_) + 1, chunk)]) for n, all_ in contents]
    paths = chained("chats", chunk, prompts).requests
    pairs = zip(paths[::2], paths[1::2], strict=True)
    return Trace("chats", chunk, tuple(replace(said, answered=both.chunks) for said, both in pairs))


def chained(name: str, chunk_tokens: int, prompts: Iterable[tuple[int, Iterable[Hashable]]]) -> Trace:
    """A trace of (length, content of each whole chunk): equal content behind equal prefixes is the same."""
    numbers: dict[tuple[int, Hashable], int] = {}
    requests = []
    for num_tokens, contents in prompts:
        chunks: list[int] = []
        for content in contents:
            before = chunks[-1] if chunks else -1
            chunks.append(numbers.setdefault((before, content), len(numbers)))
        requests.append(Request(num_tokens, tuple(chunks)))
    return Trace(name, chunk_tokens, tuple(requests))


def read_mooncake(path: Path, name: str) -> Trace:
    """One of Mooncake's traces (FAST25): a line each with `timestamp`, `input_length` and `hash_ids`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines.sort(key=lambda line: line["timestamp"])
    prompts = [(line["input_length"], line["hash_ids"][: line["input_length"] // MOONCAKE_TOKENS]) for line in lines]
    return chained(name, MOONCAKE_TOKENS, prompts)


def read_agents(folder: Path, name: str) -> Trace:
    """LMCache's agent traces: files of lines with `timestamp` and `input`, all sessions in one order of time.

    Lines without a prompt are left out."""
    lines = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    lines.sort(key=lambda line: line["timestamp"])
    size = AGENT_TOKENS * CHARACTERS_PER_TOKEN
    prompts = []
    for line in lines:
        text, num_tokens = line["input"], len(line["input"]) // CHARACTERS_PER_TOKEN
        if num_tokens:
            ends = range(size, num_tokens * CHARACTERS_PER_TOKEN + 1, size)
            prompts.append((num_tokens, [text[end - size : end] for end in ends]))
    return chained(name, AGENT_TOKENS, prompts)


def read_all(folder: Path) -> list[Trace]:
    """The three traces that figures are recorded for."""
    return [
        read_mooncake(folder / "mooncake_conversation_trace.jsonl", "conversation"),
        read_mooncake(folder / "mooncake_synthetic_trace.jsonl", "synthetic"),
        read_agents(folder / "magagent", "agents"),
    ]
