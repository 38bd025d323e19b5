"""Prompts for `request_life.py`, and tiers that hold the stored part of the prompts."""

import os
from itertools import count

from life_engine import Engine, LifeRequest
from life_sides import Ours, Side, Theirs
from planner_lookup import HASH_TOKENS, make_layout

from hybridkv.planner import GroupKind

SCENARIOS = {"miss": 0.0, "half": 0.5, "full": 1.0}
"""Stored share of each prompt."""


class Prompts:
    """Prompts of one length, and sides over tiers that hold the stored part of the prompts.

    Args:
        preset: the model.
        asked_tokens: approximate length. The real length is whole chunks plus one token, so that the last chunk can be
            part of the hit.
        scenario: key of `SCENARIOS`.
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
        """Hashes of a further prompt: the stored part, and a new part."""
        return [*self._kept, *self._hashes(self.stored_tokens - self.hit_tokens)]

    def request(self, hashes: list[bytes], more_tokens: int = 0) -> LifeRequest:
        """A request with these hashes, one more token, and `more_tokens` that are not stored."""
        extra = self._hashes(1 + more_tokens)
        return LifeRequest(str(next(self._ids)), self.stored_tokens + 1 + more_tokens, [*hashes, *extra])

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of full attention in one of our chunks."""
        full = next(group for group in self.spec.groups if group.kind is GroupKind.FULL)
        return self.spec.chunk_tokens // full.block_tokens

    @property
    def side_names(self) -> tuple[str, ...]:
        """The sides. If our chunks have one block, vLLM's default is the same as `vllm chunk`."""
        return ("ours", "vllm chunk", "vllm default") if self.blocks_per_chunk > 1 else ("ours", "vllm chunk")

    def open(self, name: str, num_beside: int = 0) -> Side:
        """A side with the stored part of the scenario in its tier."""
        engine = Engine(self.spec.groups, self._hash_tokens, self.stored_tokens + 4096, num_beside)
        # The new part of a prompt evicts other prompts, not the part that is hit. Further requests find free memory.
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
