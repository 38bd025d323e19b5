"""What the agent's thread waits for wakes it: digests that another thread takes, and a new consumer's first read."""

from __future__ import annotations

import threading

import numpy as np
from peer_ranks import WAIT_S, Engine, Rank, Side, failures, hand_over, load, tables_of, write_prompt

from hybridkv.connectors.vllm.nixl.describing import Region
from hybridkv.connectors.vllm.nixl.digesting import AT_ONCE_BYTES, Digesting
from hybridkv.connectors.vllm.nixl.memory import RankMemory
from hybridkv.connectors.vllm.nixl.messages import Held, StepPlan
from hybridkv.peers.digests import DigestRuns
from hybridkv.peers.testing.reference import ReferenceTransport, World

NUM_TOKENS = 23


def runs(*sizes: int) -> DigestRuns:
    """One behind the other from the first byte on, a digest for each."""
    num_bytes = np.array(sizes, dtype=np.int64)
    zeros = np.zeros_like(num_bytes)
    return DigestRuns(zeros, np.cumsum(num_bytes) - num_bytes, num_bytes, np.arange(1, len(sizes) + 1))


def past(num_bytes: int) -> DigestRuns:
    """Of bytes that leave the region with the last one."""
    whole = runs(num_bytes)
    return DigestRuns(whole.regions, whole.offsets + AT_ONCE_BYTES + 1 - num_bytes, whole.num_bytes, whole.ends)


def test_few_bytes_are_digested_at_once_and_more_elsewhere_and_then_somebody_is_woken() -> None:
    page = (np.arange(AT_ONCE_BYTES + 1) % 251).astype(np.uint8)
    memory = RankMemory([Region(page.ctypes.data, page.nbytes)], 1)
    woken = threading.Event()
    digesting = Digesting(memory, woken.set)
    few = digesting.take(runs(100, AT_ONCE_BYTES - 100))
    assert few is not None and few.is_done and not woken.is_set()
    more = digesting.take(runs(100, AT_ONCE_BYTES - 99))
    assert more is not None
    assert woken.wait(WAIT_S) and more.is_done, "whoever is woken finds it done"
    assert few.value is not None and more.value is not None
    assert few.value[0] == more.value[0] and few.value[1] != more.value[1]
    digesting.close()


def test_digests_that_cannot_be_taken_end_with_their_error_wherever_they_are_taken() -> None:
    page = np.zeros(AT_ONCE_BYTES, dtype=np.uint8)  # `past` ends one byte behind it
    memory = RankMemory([Region(page.ctypes.data, page.nbytes)], 1)
    woken = threading.Event()
    digesting = Digesting(memory, woken.set)
    outcomes = [digesting.take(gone) for gone in (past(1), past(AT_ONCE_BYTES + 1))]
    assert woken.wait(WAIT_S)
    for outcome in outcomes:
        assert outcome is not None and isinstance(outcome.error, ValueError)
    digesting.close()


def is_awake(rank: Rank) -> bool:
    return rank.agent._serving.is_busy


def test_a_producer_is_awake_until_a_new_consumer_has_read() -> None:
    world = World()
    side = Side()
    producer = Engine.start(side, lambda name: ReferenceTransport(name, world))
    consumer = Engine.start(side, lambda name: ReferenceTransport(name, world))
    (theirs,) = producer.ranks
    tables = tables_of(side, NUM_TOKENS)
    write_prompt(producer, tables, NUM_TOKENS)
    prompt = hand_over(producer, "p", tables, NUM_TOKENS)
    assert not is_awake(theirs)
    # The request waits for its turn; its consumer has come, and has read nothing.
    consumer.submit(lambda: StepPlan(held=[Held("d", prompt)]))
    theirs.until(lambda results: is_awake(theirs))
    load(consumer, "d", prompt, tables)
    assert failures(consumer, "d") == [None]
    theirs.until(lambda results: "p" in results.released)
    assert not is_awake(theirs)
    consumer.close()
    producer.close()
