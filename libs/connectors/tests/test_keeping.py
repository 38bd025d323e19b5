"""Kept prefixes outlive younger chunks, for the requested time and within their share, and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_store_bursts import CHUNK_TOKENS, MIB, PAIR_BYTES, Engine

from hybridkv.connectors.vllm.common.messages import StoreOutcome
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.stores.keeping import Keeper
from hybridkv.metrics import Counts
from hybridkv.planner.hints import Hints, keep_in

NEAR_BYTES = 16 * MIB
NUM_FITTING = NEAR_BYTES // PAIR_BYTES


class Kept:
    """Engine with requests that may ask for their prefix to be kept."""

    def __init__(self, path: Path) -> None:
        self.engine = Engine(path / "store", NEAR_BYTES)
        self.now_s = 0.0
        self.metrics = ConnectorMetrics()
        engine = self.engine
        self.keeper = Keeper(engine.planner._layout, engine.stack, lambda: self.now_s, self.metrics)
        engine.planner._keeper = self.keeper

    def serve(self, name: str, num_chunks: int, keep_seconds: float = 0.0) -> None:
        self.engine._begin(name).hints = Hints(keep_seconds=keep_seconds)
        self.engine.compute(name, num_chunks)
        self.engine.end(name)
        self.engine.settle()
        self.keeper.renew()

    def serve_others(self, num_chunks: int) -> None:
        for number in range(num_chunks // 4):
            self.serve(f"other {self.now_s} {number}", 4)

    def in_primary(self, name: str) -> int:
        return self.engine.resumable(name, self.engine.primary) // CHUNK_TOKENS

    def counted(self) -> dict[tuple[str, ...], float]:
        stats = self.metrics.take()
        assert stats is not None
        counters = Counts.from_dict(stats.data).data().counters
        return {labels: value for name, labels, value in counters if name == "vllm:hybridkv_keeps_total"}


@pytest.mark.parametrize("keep_seconds", [0.0, 60.0])
def test_a_kept_prefix_outlives_twice_the_capacity(tmp_path: Path, keep_seconds: float) -> None:
    bench = Kept(tmp_path)
    with bench.engine:
        bench.serve("a", 8, keep_seconds)
        bench.serve_others(2 * NUM_FITTING)
        assert bench.in_primary("a") == (8 if keep_seconds else 0)


def test_a_prefix_is_kept_no_longer_than_requested(tmp_path: Path) -> None:
    bench = Kept(tmp_path)
    with bench.engine:
        bench.serve("a", 8, 60.0)
        bench.serve_others(2 * NUM_FITTING)
        bench.now_s = 60.0
        bench.serve_others(2 * NUM_FITTING)
        assert bench.in_primary("a") == 0 and not bench.keeper._kept and bench.keeper._kept_bytes == [0, 0]


def test_keeps_beyond_the_share_are_refused_and_counted(tmp_path: Path) -> None:
    bench = Kept(tmp_path)
    with bench.engine:
        bench.serve("a", NUM_FITTING // 5, 60.0)
        bench.serve("b", NUM_FITTING // 5, 60.0)
        assert bench.counted() == {("ram", "kept"): 1, ("ram", "refused"): 1, ("disk", "kept"): 2}
        bench.serve_others(2 * NUM_FITTING)
        assert (bench.in_primary("a"), bench.in_primary("b")) == (NUM_FITTING // 5, 0)
        assert bench.keeper._kept_bytes[0] <= NEAR_BYTES // 4


def test_shared_chunks_count_once_and_the_longest_time_holds(tmp_path: Path) -> None:
    bench = Kept(tmp_path)
    with bench.engine:
        for number in range(6):
            bench.serve(f"a#{number}", NUM_FITTING // 5, 60.0 - number)
        assert bench.counted() == {("ram", "kept"): 6, ("disk", "kept"): 6}
        bench.now_s = 59.5
        bench.serve_others(2 * NUM_FITTING)
        assert bench.in_primary("a#0") == NUM_FITTING // 5


def test_a_kept_prefix_is_evicted_from_its_end_after_its_time(tmp_path: Path) -> None:
    bench = Kept(tmp_path)
    with bench.engine:
        bench.serve("a", 8, 60.0)
        bench.serve_others(2 * NUM_FITTING)
        bench.now_s = 60.0
        bench.engine.compute("large", NUM_FITTING - 4)
        assert 0 < bench.in_primary("a") < 8


def test_a_share_of_zero_keeps_nothing(tmp_path: Path) -> None:
    bench = Kept(tmp_path)
    with bench.engine:
        bench.keeper.keep_share = 0.0
        bench.serve("a", 1, 60.0)
        assert bench.counted() == {("ram", "refused"): 1, ("disk", "refused"): 1} and not bench.keeper._kept


def test_max_kept_chunks_is_not_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.connectors.vllm.offload.stores.keeping.MAX_KEPT", 5)
    bench = Kept(tmp_path)
    with bench.engine:
        bench.serve("a", 2, 60.0)
        bench.serve("b", 1, 60.0)
        assert len(bench.keeper._kept) == 4
        assert bench.counted() == {
            ("ram", "kept"): 1,
            ("disk", "kept"): 1,
            ("ram", "refused"): 1,
            ("disk", "refused"): 1,
        }


def test_kept_chunks_are_renewed_only_if_a_tier_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Kept(tmp_path)
    looks: list[object] = []
    in_order = Keeper._from_the_end

    def look(keeper: Keeper, *tier: int) -> list[bytes]:
        looks.append(tier)
        return in_order(keeper, *tier)

    with bench.engine:
        bench.serve("a", 2, 60.0)
        bench.engine.stack.clear()
        bench.keeper.renew()
        monkeypatch.setattr(Keeper, "_from_the_end", look)
        bench.keeper.renew()
        assert looks == []
        bench.serve_others(8)
        assert looks


def test_renewal_covers_only_the_chunks_kept_in_each_tier(tmp_path: Path) -> None:
    bench = Kept(tmp_path)
    with bench.engine:
        bench.serve("a", NUM_FITTING // 3, 60.0)
        assert bench.counted() == {("ram", "refused"): 1, ("disk", "kept"): 1}
        assert [len(bench.keeper._from_the_end(tier)) for tier in range(2)] == [0, len(bench.keeper._kept)]


def test_a_chunk_more_does_not_keep_a_refused_prefix(tmp_path: Path) -> None:
    bench = Kept(tmp_path)
    with bench.engine:
        bench.serve("a", NUM_FITTING // 3, 60.0)
        bench.serve("a#1", NUM_FITTING // 3 + 1, 60.0)
        assert bench.counted() == {("ram", "refused"): 2, ("disk", "kept"): 2}
        bench.serve_others(2 * NUM_FITTING)
        assert bench.in_primary("a#1") == 0


def test_a_refused_prefix_is_kept_whole_once_it_fits(tmp_path: Path) -> None:
    bench = Kept(tmp_path)
    with bench.engine:
        bench.serve("a", NUM_FITTING // 5, 60.0)
        bench.serve("b", NUM_FITTING // 5, 120.0)
        bench.now_s = 60.0
        bench.serve("b", NUM_FITTING // 5, 120.0)
        bench.serve_others(2 * NUM_FITTING)
        assert bench.in_primary("b") == NUM_FITTING // 5
        assert bench.keeper._kept_bytes[0] == NUM_FITTING // 5 * PAIR_BYTES


def test_a_reset_forgets_kept_prefixes(tmp_path: Path) -> None:
    bench = Kept(tmp_path)
    with bench.engine:
        bench.serve("a", 2, 60.0)
        bench.keeper.forget()
        assert bench.keeper._kept_bytes == [0, 0]
        bench.serve_others(2 * NUM_FITTING)
        assert bench.in_primary("a") == 0


@pytest.mark.parametrize("is_reset", [True, False])
@pytest.mark.parametrize("num_before", [0, 2])
def test_chunks_that_no_tier_holds_use_no_share(tmp_path: Path, is_reset: bool, num_before: int) -> None:
    """A request ends during its last store. Then this store fails, or a reset withdraws all chunks."""
    bench = Kept(tmp_path)
    with bench.engine as engine:
        tracked = engine._begin("a")
        tracked.hints = Hints(keep_seconds=60.0)
        if num_before:
            engine.compute("a", num_before)
        num_tokens = NUM_FITTING // 5 * CHUNK_TOKENS
        blocks = list(range(1, 2 * (num_before + num_tokens // CHUNK_TOKENS) + 1))
        store = engine.planner.plan(tracked, num_tokens, [], lambda _: (blocks, []))
        assert store is not None
        engine.end("a")
        if is_reset:
            engine.stack.clear()
            bench.keeper.forget()
        engine.planner.on_ended({store.store_id: StoreOutcome(1, *(() if is_reset else ("no thread is free", "busy")))})
        assert bench.keeper._kept_bytes[0] == (0 if is_reset else num_before * PAIR_BYTES)
        bench.serve("b", NUM_FITTING // 5, 60.0)
        assert ("ram", "refused") not in bench.counted()


def test_chunks_that_another_request_still_stores_use_no_share(tmp_path: Path) -> None:
    """The other request's store fails later."""
    bench = Kept(tmp_path)
    with bench.engine as engine:
        num_chunks = NUM_FITTING // 5
        blocks = list(range(1, 2 * num_chunks + 1))
        other = engine._begin("a#1")
        store = engine.planner.plan(other, num_chunks * CHUNK_TOKENS, [], lambda _: (blocks, []))
        assert store is not None
        tracked = engine._begin("a#0")
        tracked.hints = Hints(keep_seconds=60.0)
        assert engine.planner.plan(tracked, num_chunks * CHUNK_TOKENS, [], lambda _: (blocks, [])) is None
        engine.end("a#0")
        engine.planner.on_ended({store.store_id: StoreOutcome(1, "no thread is free", "busy")})
        assert bench.keeper._kept_bytes[0] == 0


def test_chunks_that_only_the_disk_holds_use_no_share_of_host_memory(tmp_path: Path) -> None:
    bench = Kept(tmp_path)
    with bench.engine as engine:
        num_chunks = NUM_FITTING // 5
        bench.serve("a", num_chunks)
        bench.serve_others(2 * NUM_FITTING)
        assert bench.in_primary("a") == 0
        tracked = engine._begin("a#2")
        tracked.hints = Hints(keep_seconds=60.0)
        blocks = list(range(1, 2 * num_chunks + 1))
        store = engine.planner.plan(tracked, num_chunks * CHUNK_TOKENS, [], lambda _: (blocks, []))
        engine.end("a#2")
        if store is not None:
            engine.planner.on_ended({store.store_id: StoreOutcome(1, "no thread is free", "busy")})
        assert bench.keeper._kept_bytes[0] == 0
        assert bench.keeper._kept_bytes[1] > 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 20))), st.floats(0, 1))
def test_each_tier_keeps_a_prefix_if_it_fits_there(tiers: list[tuple[int, int, int]], keep_share: float) -> None:
    kept, more, capacities = ([tier[i] for tier in tiers] for i in range(3))
    fits = keep_in(kept, more, capacities, keep_share)
    assert fits == tuple(keep_in([a], [b], [c], keep_share)[0] for a, b, c in tiers)
    assert all(is_kept == (a + b <= keep_share * c) for is_kept, (a, b, c) in zip(fits, tiers, strict=True))
