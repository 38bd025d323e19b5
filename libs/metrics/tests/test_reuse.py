"""Estimated reuse compared with an exact LRU tier, its bounded memory, and two workloads."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import pytest

from hybridkv.metrics import reuse
from hybridkv.metrics.reuse import ReuseEstimator

CHUNK_BYTES, STATE_BYTES, CHUNK_TOKENS = 1000, 4000, 64
CAPACITY = 400 * CHUNK_BYTES
MULTIPLES = (0.5, 1, 2, 4, 8)
WITHIN = 0.02
"""Share of all tokens. A sample, with chunks drawn anew in each process, may be six times as far off."""


class ExactTier:
    """LRU tier. A request uses its path from the end, so that its beginning is evicted last."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._used = 0

    def holds(self, key: bytes) -> bool:
        return key in self._sizes

    def use(self, key: bytes, num_bytes: int) -> None:
        if self._sizes.pop(key, None) is None:
            self._used += num_bytes
        self._sizes[key] = num_bytes
        while self._used > self._capacity:
            self._used -= self._sizes.popitem(last=False)[1]


def restored_chunks(tier: ExactTier, chunks: Sequence[bytes], states: Sequence[bytes]) -> int:
    held = next((place for place, key in enumerate(chunks) if not tier.holds(key)), len(chunks))
    if not states:
        return held
    return next((place for place in range(held, 0, -1) if tier.holds(states[place - 1])), 0)


def prompts(seed: int, number: int) -> Iterator[list[int]]:
    """Prompts of a tree: a few first parts, each with many continuations, popular ones more often."""
    chance = random.Random(seed)
    for _ in range(number):
        root = min(int(chance.expovariate(0.15)), 60)
        branch = min(int(chance.expovariate(0.1)), 80)
        path = [root * 1000 + place for place in range(3 + root % 5)]
        path += [1_000_000 + (root * 100 + branch) * 100 + place for place in range(2 + branch % 9)]
        yield path


def names(prefix: bytes, path: Sequence[int]) -> list[bytes]:
    return [prefix + b"%d" % number for number in path]


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("max_chunks", [1 << 14, 1 << 12])
def test_every_size_restores_as_much_as_an_exact_tier(
    monkeypatch: pytest.MonkeyPatch, has_states: bool, max_chunks: int
) -> None:
    monkeypatch.setattr(reuse, "MAX_CHUNKS", max_chunks)
    estimator = ReuseEstimator(CAPACITY, CHUNK_BYTES, CHUNK_TOKENS, STATE_BYTES if has_states else 0)
    tiers = {multiple: ExactTier(CAPACITY * multiple) for multiple in MULTIPLES}
    restored = dict.fromkeys(MULTIPLES, 0)
    total = 0
    for path in prompts(seed=1, number=6000):
        chunks, states = names(b"chunk", path), names(b"state", path) if has_states else []
        ends = states[-1:]
        total += len(chunks)
        estimator.count_prompt(len(chunks) * CHUNK_TOKENS, chunks, states)
        estimator.record_use(chunks, ends)
        for multiple, tier in tiers.items():
            restored[multiple] += restored_chunks(tier, chunks, states)
            for key in ends:
                tier.use(key, STATE_BYTES)
            for key in reversed(chunks):
                tier.use(key, CHUNK_BYTES)
    assert len(estimator._chunks) <= max_chunks
    assert (estimator._mask > 0) is (max_chunks < 1 << 14), "only the small table is a sample"
    report = estimator.report()
    assert report.prompt_tokens == total * CHUNK_TOKENS
    within = WITHIN if not estimator._mask else 6 * WITHIN
    for multiple in MULTIPLES:
        estimate = report.restored_tokens(CAPACITY * multiple) / report.prompt_tokens
        assert estimate == pytest.approx(restored[multiple] / total, abs=within), multiple
    assert 0.02 < restored[0.5] / total < restored[8] / total - 0.1, "the sizes differ in this workload"


def test_unique_prompts_and_looping_prompts_are_distinguished() -> None:
    capacity, num_chunks = 16 << 20, 18
    chunk_bytes = 64 << 10
    unique = ReuseEstimator(capacity, chunk_bytes, CHUNK_TOKENS)
    for number in range(120):
        chunks = names(b"once", range(number * 100, number * 100 + num_chunks))
        unique.count_prompt(num_chunks * CHUNK_TOKENS, chunks)
        unique.record_use(chunks)
    assert unique.report().reused_tokens == 0
    assert unique.report().bytes_for(0.95) is None

    loop = ReuseEstimator(capacity, chunk_bytes, CHUNK_TOKENS)
    for _ in range(3):
        for number in range(40):
            chunks = names(b"again", range(number * 100, number * 100 + num_chunks))
            loop.count_prompt(num_chunks * CHUNK_TOKENS, chunks)
            loop.record_use(chunks)
    report = loop.report()
    assert report.restored_tokens(capacity) == 0, "a loop larger than the tier restores nothing"
    assert report.reused_tokens == pytest.approx(report.prompt_tokens * 2 / 3)
    assert report.bytes_for(0.95) == pytest.approx(40 * num_chunks * chunk_bytes, rel=0.1)


def test_reused_tokens_end_at_the_deepest_state() -> None:
    estimator = ReuseEstimator(CAPACITY, CHUNK_BYTES, CHUNK_TOKENS, STATE_BYTES)
    path = range(10)
    chunks, states = names(b"chunk", path), names(b"state", path)
    estimator.record_use(chunks, [states[3], states[7]])
    estimator.count_prompt(10 * CHUNK_TOKENS, chunks, states)
    assert estimator.report().reused_tokens == 8 * CHUNK_TOKENS
    estimator.count_prompt(7 * CHUNK_TOKENS, chunks[:7], states[:7])
    assert estimator.report().reused_tokens == (8 + 4) * CHUNK_TOKENS


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MAX_CHUNKS", 256)
    monkeypatch.setattr(reuse, "MAX_STATES", 64)
    estimator = ReuseEstimator(CAPACITY, CHUNK_BYTES, CHUNK_TOKENS, STATE_BYTES)
    chance = random.Random(2)
    for number in range(3000):
        chunks = names(b"chunk", range(number * 20, number * 20 + 20))
        again = names(b"chunk", range(number // 2 * 20, number // 2 * 20 + chance.randrange(20)))
        for keys in (chunks, again):
            estimator.count_prompt(len(keys) * CHUNK_TOKENS, keys, keys)
            estimator.record_use(keys, keys[-1:])
    assert len(estimator._chunks) <= 256 and len(estimator._states) <= 64
    assert len(estimator._epochs) <= reuse.MAX_EPOCHS
    assert all(epoch.num_bytes >= 0 for epoch in estimator._epochs)
    held = sum(epoch.num_bytes for epoch in estimator._epochs)
    chunk_bytes = len(estimator._chunks) * CHUNK_BYTES * (estimator._mask + 1)
    assert held == chunk_bytes + len(estimator._states) * STATE_BYTES


def test_fading_halves_counts_and_forgetting_keeps_them() -> None:
    estimator = ReuseEstimator(CAPACITY, CHUNK_BYTES, CHUNK_TOKENS)
    chunks = names(b"chunk", range(8))
    for _ in range(2):
        estimator.count_prompt(8 * CHUNK_TOKENS, chunks)
        estimator.record_use(chunks)
    assert estimator.report().reused_tokens == 8 * CHUNK_TOKENS
    estimator.fade()
    assert estimator.report().prompt_tokens == estimator.report().reused_tokens * 2 == 8 * CHUNK_TOKENS
    estimator.forget_chunks()
    estimator.count_prompt(8 * CHUNK_TOKENS, chunks)
    assert estimator.report().reused_tokens == 4 * CHUNK_TOKENS
