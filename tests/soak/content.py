"""What is stored: prompts that share prefixes, and bytes that are a function of the key, so that a load can be checked.

Knows no tier.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from random import Random
from typing import NamedTuple

NUM_ROOTS = 6
"""System prompts that conversations begin with."""
NUM_BRANCHES = 3
"""Ways in which a prefix goes on."""


class Kind(StrEnum):
    """What a group needs so that a prefix can be resumed."""

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
    """Of one rank."""
    window_chunks: int = 0


Prompt = tuple[bytes, ...]
"""A digest for each chunk, which names everything up to its end."""


def draw_prompt(random: Random, longest: int) -> Prompt:
    """A walk in a tree: prompts meet again, and their beginnings more often than their ends."""
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
    """The bytes that belong to a key on one rank."""
    return hashlib.shake_128(key + bytes([rank])).digest(num_bytes)


class Need(NamedTuple):
    """What has to be in the fast tier to resume at a boundary of so many chunks."""

    num_chunks: int
    keys: tuple[bytes, ...]


def keys_needed(prompt: Prompt, num_chunks: int, groups: tuple[Group, ...]) -> tuple[bytes, ...]:
    keys: list[bytes] = []
    for group in groups:
        first = {Kind.FULL: 0, Kind.WINDOW: max(num_chunks - group.window_chunks, 0), Kind.RECURRENT: num_chunks - 1}
        keys += [key_of(prefix, group) for prefix in prompt[first[group.kind] : num_chunks]]
    return tuple(keys)
