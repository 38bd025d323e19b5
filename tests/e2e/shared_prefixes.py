"""Prompts that share beginnings, and what each of them must find in a store that has room for all. No engine here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from harness import make_prompt

Tokens: TypeAlias = list[int]

CHAT_TURNS = 5
BRANCHINGS = 3
CHILDREN = 3


def resumable(end_tokens: int, block_tokens: int) -> int:
    """Where a request goes on that begins with `end_tokens` tokens of another one, of which the last was never
    computed."""
    return (end_tokens - 1) // block_tokens * block_tokens


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def found(prompts: Sequence[Sequence[int]], block_tokens: int, *, places_states: bool) -> list[int]:
    """Tokens that each prompt finds, one after the other, where everything that was stored stays.

    Attention is found wherever an earlier prompt began alike. A state lies at the last boundary of every prompt, which
    is what the engine hands over; and, where states are placed, at the last boundary below the place where a prompt
    left those before it, if no state was found there. So of siblings the first that follows finds what it can, and the
    second and all others find the last boundary below the branch. States at more places than that only add to it.
    """
    states: set[tuple[int, ...]] = set()
    hits = []
    for number, prompt in enumerate(prompts):
        last = resumable(len(prompt), block_tokens)
        ends = [end for end in range(block_tokens, last + 1, block_tokens) if tuple(prompt[:end]) in states]
        hits.append(max(ends, default=0))
        shared = max((shared_tokens(prompt, earlier) for earlier in prompts[:number]), default=0)
        junction = min(shared // block_tokens * block_tokens, last)
        if places_states and junction > hits[-1]:
            states.add(tuple(prompt[:junction]))
        states.add(tuple(prompt[:last]))
    return hits


@dataclass(frozen=True, slots=True)
class Workloads:
    """What requests look like, in blocks of a model's cache.

    Args:
        block_tokens: of every group.
    """

    block_tokens: int

    @property
    def branch(self) -> int:
        """The last boundary below the place where siblings part."""
        return 5 * self.block_tokens

    def siblings(self, count: int, *, seed: int = 0) -> list[Tokens]:
        """Prompts that share more than `branch` tokens, and less than a block more."""
        stem = make_prompt(self.branch + self.block_tokens // 2, seed=1000 + seed)
        length = len(stem) + 3 * self.block_tokens // 2 + 4
        return [make_prompt(length, seed=2000 + 100 * seed + i, prefix=stem) for i in range(count)]

    def tree(self, *, seed: int = 0) -> list[Tokens]:
        """Leaves of an agent's tree: three branchings on one path, each with three ways on, of which it follows the
        last."""
        path: Tokens = []
        leaves = []
        for level in range(BRANCHINGS):
            path = make_prompt(len(path) + 3 * self.block_tokens // 2, seed=3000 + 10 * seed + level, prefix=path)
            is_last = level + 1 == BRANCHINGS
            for child in range(CHILDREN if is_last else CHILDREN - 1):
                length = len(path) + self.block_tokens + self.block_tokens // 4
                leaves.append(make_prompt(length, seed=4000 + 100 * seed + 10 * level + child, prefix=path))
        return leaves

    @property
    def first_message_tokens(self) -> int:
        """Of a chat."""
        return 2 * self.block_tokens + self.block_tokens // 3

    @property
    def message_tokens(self) -> int:
        """Of every later turn."""
        return self.block_tokens // 4 + 3

    def answer_tokens(self, turn: int, prompt_tokens: int) -> int:
        """Of a chat's turn: a block and some more. The second ends where a block ends, so that the state there is never
        computed; the third one token later, so that it is computed by its very last step."""
        wanted = self.block_tokens + self.block_tokens // 8
        past = (prompt_tokens + wanted) % self.block_tokens
        if turn == 1:
            return wanted + self.block_tokens - past
        if turn == 2:
            return wanted + self.block_tokens - past + 1
        return wanted

    def first_message(self, *, seed: int = 0) -> Tokens:
        return make_prompt(self.first_message_tokens, seed=5000 + seed)

    def next_turn(self, prompt: Sequence[int], answer: Sequence[int], *, seed: int) -> Tokens:
        """The prompt that follows an answer."""
        so_far = [*prompt, *answer]
        return make_prompt(len(so_far) + self.message_tokens, seed=6000 + seed, prefix=so_far)
