"""Prompts with common prefixes, and the tokens that each must find in a store with unlimited room. Uses no engine."""

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
    """Where a request resumes that begins with `end_tokens` tokens of another one, whose last token was never
    computed.
    """
    return (end_tokens - 1) // block_tokens * block_tokens


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of leading tokens that both share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def found(prompts: Sequence[Sequence[int]], block_tokens: int, *, places_states: bool) -> list[int]:
    """Tokens that each of the consecutive prompts finds if everything stored is kept.

    Attention is found wherever an earlier prompt has the same prefix. A state is stored at the last boundary of every
    prompt, which the engine provides. If `places_states`, a state is also stored at the last boundary before the point
    where a prompt leaves the earlier ones, if none was found there. So the second of several siblings finds only older
    states, and the third and later ones find the last boundary before the branch. States at more positions can only add
    to it.
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
    """Requests, measured in blocks of a model's cache.

    Args:
        block_tokens: tokens per block, of every group.
    """

    block_tokens: int

    @property
    def branch(self) -> int:
        """The last boundary before the point where siblings differ."""
        return 5 * self.block_tokens

    def siblings(self, count: int, *, seed: int = 0) -> list[Tokens]:
        """Prompts that share more than `branch` tokens, but less than a block more."""
        stem = make_prompt(self.branch + self.block_tokens // 2, seed=1000 + seed)
        length = len(stem) + 3 * self.block_tokens // 2 + 4
        return [make_prompt(length, seed=2000 + 100 * seed + i, prefix=stem) for i in range(count)]

    def tree(self, *, seed: int = 0) -> list[Tokens]:
        """Leaves of an agent's tree: three branching points on one path, each with three continuations, the last of
        which is followed.
        """
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
        """Tokens of the first message of a chat."""
        return 2 * self.block_tokens + self.block_tokens // 3

    @property
    def message_tokens(self) -> int:
        """Tokens of the message in each later turn."""
        return self.block_tokens // 4 + 3

    def answer_tokens(self, turn: int, prompt_tokens: int) -> int:
        """Tokens of the answer in a turn of a chat: a block and some more. The second answer ends at a block boundary,
        so its last state is never computed; the third ends one token later, so its last step computes the state.
        """
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
