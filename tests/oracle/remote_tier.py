"""The connector with RAM, a disk and a remote store, with simulated time and faults of the store.

The remote store is the reference: it answers late or never, its moves take time, it loses chunks and claims to hold
others. None of that may reach the engine as a wrong byte, or keep a request beyond its deadlines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm.offload import tiers
from hybridkv.tiers.stack import CascadePolicy, SecondaryTier, SecondaryTierOptions
from kits.tiers.reference import RemoteIndex, RemoteMedium, RemoteStore
from oracle.disk_tier import forget

if TYPE_CHECKING:
    import pytest

    from hybridkv.tiers import TierMedium
    from oracle.engine import OracleEngine

STEP_S = 0.001
ASK_S, LOOKUP_S, LOAD_S = 0.004, 0.05, 0.1
CAPACITY_BYTES = 1 << 30
PEER = "peer"


@dataclass
class World:
    """Time, and the remote store, for all engines of a test."""

    now_s: float = 0.0
    store: RemoteStore = field(init=False)
    longest_wait_s: float = 0.0
    """Longest time for which one request was told to ask again, without a break."""
    waited_s: dict[str, float] = field(default_factory=dict)
    """The same for each request."""
    capacity_bytes: int = CAPACITY_BYTES
    """Capacity of an engine's index of the store."""
    cascades: CascadePolicy = CascadePolicy.ALL

    def __post_init__(self) -> None:
        self.begin_anew()

    def clock(self) -> float:
        return self.now_s

    def begin_anew(self) -> None:
        """Replaces the store by an empty one."""
        self.store = RemoteStore(1, self.clock)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every connector that is built from now on uses this world."""
        indexes, openers = tiers.secondary_tiers, tiers.medium_openers

        def secondary_tiers(*arguments: Any) -> list[SecondaryTier]:
            options = SecondaryTierOptions(
                cascades=self.cascades, async_lookup_timeout_s=ASK_S, load_timeout_s=LOAD_S / 2
            )
            return [*indexes(*arguments), SecondaryTier(PEER, self.make_index(), options)]

        def all_openers(config: Any, rank: int, *more: Any) -> dict[str, Callable[[bytes], TierMedium]]:
            return {**openers(config, rank, *more), PEER: lambda namespace: self.make_medium(rank)}

        monkeypatch.setattr(tiers, "clock", self.clock)
        monkeypatch.setattr(tiers, "secondary_tiers", secondary_tiers)
        monkeypatch.setattr(tiers, "medium_openers", all_openers)

    def make_index(self) -> RemoteIndex:
        return RemoteIndex(self.store, self.capacity_bytes)

    def make_medium(self, rank: int) -> TierMedium:
        return RemoteMedium(self.store, rank)

    def steps(self, seed: int, *, is_kind: bool = False) -> Callable[[OracleEngine, int], None]:
        """A hook that advances time and injects faults; with `is_kind`, no faults."""
        random = Random(seed)
        evict = forget(random)
        waits: dict[str, float] = {}

        def before_step(engine: OracleEngine, step: int) -> None:
            self.now_s += STEP_S
            if step == 0:
                self._watch(engine, waits)
            if not is_kind:
                evict(engine, step)
                self._trouble(random)

        return before_step

    def _trouble(self, random: Random) -> None:
        store = self.store
        if random.random() < 0.1:
            store.answer_s = random.choice((0.0, 0.001, 0.003, 0.02))
            store.move_s = random.choice((0.0, 0.002, 0.02, LOAD_S))
            store.is_silent = random.random() < 0.1
        if store.directory and random.random() < 0.1:
            store.vanish(random.choice(list(store.directory)))
        if store.directory and random.random() < 0.1:
            key = random.choice(list(store.directory))
            store.lie(key, store.directory[key].num_bytes)
        if store.directory and random.random() < 0.1:
            store.confuse(*random.choices(list(store.directory), k=2))

    def _watch(self, engine: OracleEngine, waits: dict[str, float]) -> None:
        connector = engine.scheduler_connector
        assert connector is not None
        ask = connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            answer = ask(request, num_computed_tokens)
            if answer[0] is None:
                began_s = waits.setdefault(request.request_id, self.now_s)
                waited_s = self.now_s - began_s
                self.longest_wait_s = max(self.longest_wait_s, waited_s)
                self.waited_s[request.request_id] = max(self.waited_s.get(request.request_id, 0.0), waited_s)
            else:
                waits.pop(request.request_id, None)
            return answer

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens  # type: ignore[method-assign]
