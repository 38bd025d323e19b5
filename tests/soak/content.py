"""The stored content: prompts with shared prefixes, and bytes computed from the key, so that loads can be checked.

Knows no tier.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from random import Random
from typing import NamedTuple

NUM_ROOTS = 6
"""Number of system prompts with which conversations begin."""
NUM_BRANCHES = 3
"""Number of possible continuations of a prefix."""


class Kind(StrEnum):
    """Which chunks a group needs to resume a prefix."""

    FULL = "full"
    """Every chunk of the prefix."""
    WINDOW = "window"
    """The last chunks before the boundary."""
    RECURRENT = "recurrent"
    """The state at the boundary."""


class Group(NamedTuple):
    """One group of a model's KV cache."""

    number: int
    kind: Kind
    chunk_bytes: int
    """Size of a chunk on one rank."""
    window_chunks: int = 0


Prompt = tuple[bytes, ...]
"""One digest per chunk; it identifies the whole prefix up to the end of that chunk."""


def draw_prompt(random: Random, longest: int) -> Prompt:
    """A random walk in a tree. Prompts share prefixes, short ones more often than long ones."""
    # The square makes some roots much more frequent than others.
    digest = b"root %d" % int(NUM_ROOTS * random.random() ** 2)
    chunks = []
    for _ in range(random.randint(1, longest)):
        branch = int(NUM_BRANCHES * random.random() ** 2)
        digest = hashlib.blake2b(digest + bytes([branch]), digest_size=16).digest()
        chunks.append(digest)
    return tuple(chunks)


def key_of(prefix: bytes, group: Group) -> bytes:
    return prefix + bytes([group.number])


def payload(key: bytes, rank: int, num_bytes: int) -> bytes:
    """The expected bytes of a key on one rank."""
    return hashlib.shake_128(key + bytes([rank])).digest(num_bytes)


class Need(NamedTuple):
    """The keys that must be in the fast tier to resume after `num_chunks` chunks."""

    num_chunks: int
    keys: tuple[bytes, ...]


def keys_needed(prompt: Prompt, num_chunks: int, groups: tuple[Group, ...]) -> tuple[bytes, ...]:
    keys: list[bytes] = []
    for group in groups:
        first = {Kind.FULL: 0, Kind.WINDOW: max(num_chunks - group.window_chunks, 0), Kind.RECURRENT: num_chunks - 1}
        keys += [key_of(prefix, group) for prefix in prompt[first[group.kind] : num_chunks]]
    return tuple(keys)
