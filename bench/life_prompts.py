"""Prompts whose lives are compared, and tiers that hold of them what a scenario says."""

import os
from itertools import count

from life_engine import Engine, LifeRequest
from life_sides import Ours, Side, Theirs
from planner_lookup import HASH_TOKENS, make_layout

from hybridkv.planner import GroupKind

SCENARIOS = {"miss": 0.0, "half": 0.5, "full": 1.0}
"""What of each prompt is stored."""


class Prompts:
    """Prompts of one length, and sides over tiers that hold what a scenario says.

    Args:
        preset: the model.
        asked_tokens: about how long; it is whole chunks and one token more, so that the last chunk can be a part of
            the hit.
        scenario: what of it is stored.
    """

    def __init__(self, preset: str, asked_tokens: int, scenario: str) -> None:
        self.preset, self.scenario = preset, scenario
        self.spec = make_layout(preset).spec
        chunk = self.spec.chunk_tokens
        self.stored_tokens = max(asked_tokens // chunk, 4) * chunk
        self._hash_tokens = HASH_TOKENS[preset]
        self.hit_tokens = int(self.stored_tokens * SCENARIOS[scenario]) // chunk * chunk
        self._kept = self._hashes(self.hit_tokens)
        self._ids = count()

    def _hashes(self, num_tokens: int) -> list[bytes]:
        raw = os.urandom(32 * (num_tokens // self._hash_tokens))
        return [raw[i : i + 32] for i in range(0, len(raw), 32)]

    def next_hashes(self) -> list[bytes]:
        """Of one more prompt: what is stored of it, and what is new."""
        return [*self._kept, *self._hashes(self.stored_tokens - self.hit_tokens)]

    def request(self, hashes: list[bytes], more_tokens: int = 0) -> LifeRequest:
        """Of a prompt with these hashes, and so many tokens more that nobody has stored."""
        behind = self._hashes(1 + more_tokens)
        return LifeRequest(str(next(self._ids)), self.stored_tokens + 1 + more_tokens, [*hashes, *behind])

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of full attention in a chunk of ours."""
        full = next(group for group in self.spec.groups if group.kind is GroupKind.FULL)
        return self.spec.chunk_tokens // full.block_tokens

    @property
    def side_names(self) -> tuple[str, ...]:
        """Where ours has one block to a chunk, vLLM's default is the same."""
        return ("ours", "vllm chunk", "vllm default") if self.blocks_per_chunk > 1 else ("ours", "vllm chunk")

    def open(self, name: str, num_beside: int = 0) -> Side:
        """A side with its tier as the scenario says."""
        engine = Engine(self.spec.groups, self._hash_tokens, self.stored_tokens + 4096, num_beside)
        # What is new of a prompt pushes out what was there besides, and not what is hit; where many run it finds room.
        new_tokens = self.stored_tokens - self.hit_tokens
        spare_tokens = num_beside * self.spec.chunk_tokens
        room_tokens = self.stored_tokens + (new_tokens if self.hit_tokens else 0) + spare_tokens
        side: Side
        if name == "ours":
            side = Ours(self.preset, engine, room_tokens)
        else:
            side = Theirs(self.preset, engine, room_tokens, self.blocks_per_chunk if name == "vllm chunk" else 1)
        if others := room_tokens - spare_tokens - self.hit_tokens:
            side.fill(self._hashes(others))
        side.fill(self._kept)
        return side
