"""A router's index, rebuilt only from the events that an engine publishes; it predicts how much of a request is cached.

It decodes events as vLLM's publisher packs them, and finds the blocks of a prompt by the tokens in the events. It knows
nothing of chunks: a request can resume where an event of a full group ends.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEventBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FULL_KINDS = ("full_attention", "mla_attention")
WINDOW_KINDS = ("sliding_window", "sliding_window_mla")
TIERS = ("CPU", "STORAGE")

Hash = bytes | int


class Publisher:
    """Replaces an engine's publisher: packs each batch as `ZmqEventPublisher` does, and passes it to all listeners."""

    def __init__(self) -> None:
        self._pack = msgspec.msgpack.Encoder()
        self.listeners: list[Callable[[bytes], None]] = []
        self.num_batches = 0

    def publish(self, events: EventBatch) -> None:
        self.num_batches += 1
        payload = self._pack.encode(events)
        for listener in self.listeners:
            listener(payload)

    def shutdown(self) -> None:
        """There is nothing to shut down."""


class Router:
    """One subscriber.

    Args:
        clears: whether it handles `AllBlocksCleared`; otherwise it ignores it.
        keeps: whether an event arrives; other events are lost.
        media: the media whose events it handles.
    """

    def __init__(
        self,
        clears: bool = True,
        keeps: Callable[[Any], bool] = lambda event: True,
        media: tuple[str, ...] = TIERS,
    ) -> None:
        self._clears, self._keeps, self._media = clears, keeps, media
        self._unpack = msgspec.msgpack.Decoder(type=KVEventBatch)
        self.held: Counter[tuple[str, int, Hash]] = Counter()
        """Stored and not yet removed: (medium, group, block)."""
        self._by_tokens: dict[tuple[Hash | None, tuple[int, ...]], Hash] = {}
        self._ends: set[Hash] = set()
        self._groups: dict[int, tuple[str, int | None]] = {}
        self._block_tokens = 0
        self._was_cleared = False
        """During such a batch, held blocks are announced again, after their first announcement."""
        self._awaited: list[tuple[int, Hash]] = []
        """Blocks that must be held at the end of such a batch because other blocks follow them."""
        self.num_events: Counter[str] = Counter()

    def hear(self, payload: bytes) -> None:
        self._was_cleared = False
        for event in self._unpack.decode(payload).events:
            if self._keeps(event):
                self._hear(event)
        assert all(self._holds(*place) for place in self._awaited), "a block whose parent is not held"
        self._awaited.clear()

    def _hear(self, event: Any) -> None:
        self.num_events[f"{type(event).__name__} {getattr(event, 'medium', '')}"] += 1
        if isinstance(event, AllBlocksCleared):
            if self._clears:
                self.held.clear()
                self._was_cleared = True
        elif event.medium not in self._media:
            return  # mostly what the engine itself caches
        elif isinstance(event, BlockStored):
            self._stored(event)
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                place = (event.medium, event.group_idx, block)
                assert self.held[place] == 1 or self._was_cleared, f"removed but never stored: {place}"
                del self.held[place]

    def _stored(self, event: BlockStored) -> None:
        size = event.block_size
        assert event.token_ids and size and len(event.token_ids) == size * len(event.block_hashes), event
        assert event.extra_keys is not None and len(event.extra_keys) == len(event.block_hashes), event
        assert event.group_idx is not None and event.kv_cache_spec_kind is not None, event
        assert self._block_tokens in (0, size)
        self._block_tokens = size
        self._groups[event.group_idx] = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        parent = event.parent_block_hash
        for number, block in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[number * size : (number + 1) * size])
            self._by_tokens[parent, tokens] = parent = block
            place = (str(event.medium), event.group_idx, block)
            self.held[place] += 1
            assert self.held[place] == 1, f"stored twice: {place}"
        if event.kv_cache_spec_kind in FULL_KINDS:
            before = event.parent_block_hash
            if before is not None and self._media == TIERS and not self._holds(event.group_idx, before):
                # After a clear, all held blocks are announced again, possibly after blocks that follow them.
                assert self._was_cleared, "a block whose parent is not held"
                self._awaited.append((event.group_idx, before))
            self._ends.add(event.block_hashes[-1])

    def _holds(self, group: int, block: Hash) -> bool:
        return any((tier, group, block) in self.held for tier in self._media)

    def path_of(self, prompt: Sequence[int]) -> list[Hash]:
        """The leading blocks of a prompt that all full groups hold."""
        full = [group for group, (kind, _) in self._groups.items() if kind in FULL_KINDS]
        path: list[Hash] = []
        parent: Hash | None = None
        # The last token is always computed.
        for end in range(self._block_tokens or 1, len(prompt), self._block_tokens or 1):
            parent = self._by_tokens.get((parent, tuple(prompt[end - self._block_tokens : end])))
            if parent is None or not full or not all(self._holds(group, parent) for group in full):
                break
            path.append(parent)
        return path

    def predict_by_attention(self, prompt: Sequence[int]) -> int:
        """Predict as routers that score only full attention: the longest stored prefix at which a request may
        resume.
        """
        path = self.path_of(prompt)
        ends = [number for number, block in enumerate(path, 1) if block in self._ends]
        return ends[-1] * self._block_tokens if ends else 0

    def predict_by_states(self, prompt: Sequence[int]) -> int:
        """Predict as a router that scores one recurrent group only: the deepest of its states that this prompt
        reaches.
        """
        recurrent = [group for group, (kind, _) in self._groups.items() if kind == "mamba"][:1]
        path = self.path_of(prompt)
        ends = [number for group in recurrent for number, block in enumerate(path, 1) if self._holds(group, block)]
        return max(ends, default=0) * self._block_tokens

    def predict(self, prompt: Sequence[int]) -> int:
        """The number of tokens that will be restored: every group has the blocks that it reads there."""
        path, size = self.path_of(prompt), self._block_tokens
        for num_blocks in range(len(path), 0, -1):
            if path[num_blocks - 1] in self._ends and all(
                self._holds(group, block)
                for group, (kind, window) in self._groups.items()
                for block in path[_first_read(kind, window, num_blocks, size) : num_blocks]
            ):
                return num_blocks * size
        return 0


def _first_read(kind: str, window: int | None, num_blocks: int, block_tokens: int) -> int:
    """The first block that a group reads when a request resumes after `num_blocks` blocks."""
    if kind in WINDOW_KINDS:
        assert window is not None
        return max(0, num_blocks * block_tokens - (window - 1)) // block_tokens
    if kind == "mamba":
        return num_blocks - 1
    assert kind in FULL_KINDS, kind
    return num_blocks
