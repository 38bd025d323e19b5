"""Engines without vLLM: both halves of all configured tiers, as the connector builds them, with steps."""

from __future__ import annotations

from collections.abc import Sequence

import patience
from test_worker_facts import layout

from hybridkv.connectors.config import OffloadConfig
from hybridkv.connectors.vllm.offload import tiers
from hybridkv.planner import LookupResult
from hybridkv.tiers import Key, Slot, TierMedium
from hybridkv.tiers.ram import RamArena
from hybridkv.tiers.stack import MoveOutcome, PromotionLease, TierMover
from kits.peers.suite import until

LAYOUT = layout()
SIZES = tiers.ArenaSizes(1 << 20, 4096)


class Engine:
    """Both halves of all configured tiers, as the connector builds them."""

    def __init__(self, config: OffloadConfig, model: str = "m") -> None:
        fingerprint = LAYOUT.fingerprint({"model": model})
        self.stack = tiers.build_stack(config, LAYOUT, fingerprint, SIZES)
        self.arena = RamArena(SIZES.rank_bytes, SIZES.granule_bytes)
        opened: dict[str, TierMedium] = {
            name: make(fingerprint.digest()) for name, make in tiers.medium_openers(config, 0, self.arena).items()
        }
        self.mover = TierMover(self.arena, opened, tiers.clock)

    def step(self) -> None:
        self.stack.tick()
        self.mover.start(self.stack.take_moves())
        for move, failure, _ in self.mover.poll():
            self.stack.on_move(move.move_id, MoveOutcome(1, failure))

    def store(self, key: Key, chunk: bytes) -> None:
        slot = self.stack.reserve(key, len(chunk))
        assert isinstance(slot, Slot)
        views, rest = self.arena.views(slot), chunk
        for view in views:
            view[:], rest = rest[: len(view)], rest[len(view) :]
        assert self.arena.seal_all([(key, slot)]) == [None]
        assert self.stack.commit(key)

    def lookups(self, *keys: Key, hinted: Sequence[tuple[str, int]] = ()) -> list[LookupResult]:
        """Results of lookups after all tiers have answered."""
        self.stack.start_lookup(keys, hinted)
        until(lambda: not self.stack.any_pending(keys))
        return [self.stack.lookup(key) for key in keys]

    def load(self, key: Key) -> bytes | None:
        """Bytes of the chunk, loaded through a promotion lease as for a request."""
        hold = self.stack.acquire("request", [key])
        assert isinstance(hold, PromotionLease)

        def is_over() -> bool:
            self.step()
            now = self.stack.lease("request")
            return now is None or now.is_ready or now.failure is not None

        until(is_over)
        slots = self.stack.pin_all([key])
        chunk = None if slots is None else b"".join(self.arena.views(slots[0]))
        if slots is not None:
            assert self.arena.check_all([(key, slots[0])]) == [None]
            self.stack.unpin_all([key])
        self.stack.release("request")
        return chunk

    def close(self) -> None:
        assert self.mover.close(patience.seconds(6.0))
        self.stack.close()
        self.arena.close()
