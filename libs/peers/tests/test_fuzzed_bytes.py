"""Every decoder refuses changed bytes within bounds. `FUZZ_SECONDS` makes it run longer."""

from __future__ import annotations

import os
from random import Random

import pytest
from fuzz_targets import TARGETS

from kits.peers.fuzzing import FindingError, Target, bounded_memory, changed, fuzz

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
NUM_INPUTS = 1000
MEMORY_BYTES = 1 << 30
"""Bytes that a target may allocate beyond those of this process."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name.replace(" ", "_"))
def test_changed_bytes_are_refused_within_bounds(target: Target) -> None:
    with bounded_memory(MEMORY_BYTES):
        count = fuzz(target, SEED, NUM_INPUTS, SECONDS / len(TARGETS))
    assert count >= NUM_INPUTS


def test_a_seed_always_makes_the_same_changes() -> None:
    corpus = TARGETS[0].corpus
    first, again, other = ([changed(random, corpus) for _ in range(50)] for random in map(Random, (1, 1, 2)))
    assert first == again != other
    assert len(set(first)) > 40


def test_a_failure_of_a_target_is_reported_with_its_bytes() -> None:
    def fragile(data: bytes) -> None:
        if len(data) > 4:
            raise KeyError("a bug")

    with pytest.raises(FindingError, match="fragile: KeyError") as caught:
        fuzz(Target("fragile", (b"1234",), fragile, (ValueError,)), 0, 1000)
    assert isinstance(caught.value.__cause__, KeyError)


def test_memory_beyond_the_bound_is_a_finding() -> None:
    with pytest.raises(FindingError, match="MemoryError"), bounded_memory(MEMORY_BYTES):
        fuzz(Target("greedy", (b"x",), lambda data: bytearray(2 * MEMORY_BYTES)), 0, 1)
    assert bytearray(2 * MEMORY_BYTES)
