"""What requests asked to be kept outlives what is younger, for its time and within its share, and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_store_bursts import CHUNK_TOKENS, MIB, PAIR_BYTES, Engine

from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.stores.keeping import Keeper
from hybridkv.metrics import Counts
from hybridkv.planner.hints import Hints, keep_in

NEAR_BYTES = 16 * MIB
NUM_FITTING = NEAR_BYTES // PAIR_BYTES


class Kept:
    """An engine whose requests may ask to be kept."""

    def __init__(self, path: Path) -> None:
        self.engine = Engine(path / "store", NEAR_BYTES)
        self.now_s = 0.0
        self.metrics = ConnectorMetrics()
        engine = self.engine
        self.keeper = Keeper(engine.planner._layout, engine.stack, lambda: self.now_s, self.metrics)
        engine.planner._keeper = self.keeper

    def ask(self, name: str, num_chunks: int, keep_seconds: float = 0.0) -> None:
        self.engine._begin(name).hints = Hints(keep_seconds=keep_seconds)
        self.engine.compute(name, num_chunks)
        self.engine.end(name)
        self.engine.settle()
        self.keeper.renew()

    def others(self, num_chunks: int) -> None:
        for number in range(num_chunks // 4):
            self.ask(f"other {self.now_s} {number}", 4)

    def in_primary(self, name: str) -> int:
        return self.engine.resumable(name, self.engine.primary) // CHUNK_TOKENS

    def counted(self) -> dict[tuple[str, ...], float]:
        stats = self.metrics.take()
        assert stats is not None
        counters = Counts.from_dict(stats.data).data().counters
        return {labels: value for name, labels, value in counters if name == "vllm:hybridkv_keeps_total"}


@pytest.mark.parametrize("keep_seconds", [0.0, 60.0])
def test_a_prefix_that_is_kept_outlives_twice_the_tier(tmp_path: Path, keep_seconds: float) -> None:
    it = Kept(tmp_path)
    with it.engine:
        it.ask("a", 8, keep_seconds)
        it.others(2 * NUM_FITTING)
        assert it.in_primary("a") == (8 if keep_seconds else 0)


def test_it_is_kept_no_longer_than_was_asked(tmp_path: Path) -> None:
    it = Kept(tmp_path)
    with it.engine:
        it.ask("a", 8, 60.0)
        it.others(2 * NUM_FITTING)
        it.now_s = 60.0
        it.others(2 * NUM_FITTING)
        assert it.in_primary("a") == 0 and not it.keeper._kept and it.keeper._kept_bytes == [0, 0]


def test_no_more_is_kept_than_its_share_and_the_rest_is_counted(tmp_path: Path) -> None:
    it = Kept(tmp_path)
    with it.engine:
        it.ask("a", NUM_FITTING // 5, 60.0)
        it.ask("b", NUM_FITTING // 5, 60.0)
        assert it.counted() == {("ram", "kept"): 1, ("ram", "refused"): 1, ("disk", "kept"): 2}
        it.others(2 * NUM_FITTING)
        assert (it.in_primary("a"), it.in_primary("b")) == (NUM_FITTING // 5, 0)
        assert it.keeper._kept_bytes[0] <= NEAR_BYTES // 4


def test_what_requests_share_counts_once_and_the_longest_time_holds(tmp_path: Path) -> None:
    it = Kept(tmp_path)
    with it.engine:
        for number in range(6):
            it.ask(f"a#{number}", NUM_FITTING // 5, 60.0 - number)
        assert it.counted() == {("ram", "kept"): 6, ("disk", "kept"): 6}
        it.now_s = 59.5
        it.others(2 * NUM_FITTING)
        assert it.in_primary("a#0") == NUM_FITTING // 5


def test_the_end_of_what_is_kept_goes_before_its_beginning(tmp_path: Path) -> None:
    it = Kept(tmp_path)
    with it.engine:
        it.ask("a", 8, 60.0)
        it.others(2 * NUM_FITTING)
        it.now_s = 60.0
        it.engine.compute("large", NUM_FITTING - 4)
        assert 0 < it.in_primary("a") < 8


def test_nothing_is_kept_where_the_share_is_none(tmp_path: Path) -> None:
    it = Kept(tmp_path)
    with it.engine:
        it.keeper.keep_share = 0.0
        it.ask("a", 1, 60.0)
        assert it.counted() == {("ram", "refused"): 1, ("disk", "refused"): 1} and not it.keeper._kept


def test_no_more_chunks_are_kept_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.connectors.vllm.offload.stores.keeping.MAX_KEPT", 5)
    it = Kept(tmp_path)
    with it.engine:
        it.ask("a", 2, 60.0)
        it.ask("b", 1, 60.0)
        assert len(it.keeper._kept) == 4
        assert it.counted() == {("ram", "kept"): 1, ("disk", "kept"): 1, ("ram", "refused"): 1, ("disk", "refused"): 1}


def test_what_is_kept_is_gone_through_only_when_a_tier_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Kept(tmp_path)
    looks: list[object] = []
    in_order = Keeper._from_the_end

    def look(keeper: Keeper, *tier: int) -> list[bytes]:
        looks.append(tier)
        return in_order(keeper, *tier)

    with it.engine:
        it.ask("a", 2, 60.0)
        it.engine.stack.clear()
        it.keeper.renew()
        monkeypatch.setattr(Keeper, "_from_the_end", look)
        it.keeper.renew()
        assert looks == []
        it.others(8)
        assert looks


def test_for_one_tier_only_that_is_gone_through_which_is_kept_there(tmp_path: Path) -> None:
    it = Kept(tmp_path)
    with it.engine:
        it.ask("a", NUM_FITTING // 3, 60.0)
        assert it.counted() == {("ram", "refused"): 1, ("disk", "kept"): 1}
        assert [len(it.keeper._from_the_end(tier)) for tier in range(2)] == [0, len(it.keeper._kept)]


def test_a_reset_forgets_what_is_kept(tmp_path: Path) -> None:
    it = Kept(tmp_path)
    with it.engine:
        it.ask("a", 2, 60.0)
        it.keeper.forget()
        assert it.keeper._kept_bytes == [0, 0]
        it.others(2 * NUM_FITTING)
        assert it.in_primary("a") == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 20))), st.floats(0, 1))
def test_where_it_fits_it_is_kept_tier_by_tier(tiers: list[tuple[int, int, int]], keep_share: float) -> None:
    kept, more, capacities = ([tier[i] for tier in tiers] for i in range(3))
    fits = keep_in(kept, more, capacities, keep_share)
    assert fits == tuple(keep_in([a], [b], [c], keep_share)[0] for a, b, c in tiers)
    assert all(is_kept == (a + b <= keep_share * c) for is_kept, (a, b, c) in zip(fits, tiers, strict=True))
