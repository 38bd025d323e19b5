"""The traces of the recorded results, parts of these traces, and synthetic traces."""

from __future__ import annotations

import enum
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

from hybridkv.cli.simulation.traces import Trace, chained, read_agents, read_mooncake


class Part(enum.StrEnum):
    """A part of a trace. It runs alone, with an empty store and a new planner."""

    WHOLE = "whole"
    FIRST = "first half"
    SECOND = "second half"


def part_of(trace: Trace, part: Part) -> Trace:
    """The requests of a part."""
    middle = len(trace.requests) // 2
    taken = {Part.WHOLE: slice(None), Part.FIRST: slice(middle), Part.SECOND: slice(middle, None)}[part]
    return replace(trace, requests=trace.requests[taken])


def chats(num: int, turns: int, first: int, more: int, answer: int, *, keeps: int, chunk_tokens: int = 128) -> Trace:
    """Conversations with answers, turn by turn.

    Args:
        num: number of conversations.
        turns: turns of each conversation.
        first: tokens of a user's first message.
        more: tokens of a user's later messages.
        answer: tokens of an answer.
        keeps: last tokens of an answer that stay in the history; fewer if a model's reasoning is dropped.
        chunk_tokens: tokens of a chunk.
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


def read_all(folder: Path) -> list[Trace]:
    """Reads the three traces of the recorded results."""
    return [
        read_mooncake(folder / "mooncake_conversation_trace.jsonl", "conversation"),
        read_mooncake(folder / "mooncake_synthetic_trace.jsonl", "synthetic"),
        read_agents(folder / "magagent", "agents"),
    ]
