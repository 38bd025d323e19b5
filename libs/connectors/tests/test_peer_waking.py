"""Wake-ups of the agent's thread: by digests of another thread, and for a new consumer's first read."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from peer_ranks import WAIT_S, Engine, Rank, Side, failures, hand_over, load, tables_of, write_prompt

from hybridkv.connectors.vllm.nixl.agent import lease_server, rank_read
from hybridkv.connectors.vllm.nixl.agent.agent import Agent
from hybridkv.connectors.vllm.nixl.memory import rank_memory
from hybridkv.connectors.vllm.nixl.memory.description import MemoryRegion
from hybridkv.connectors.vllm.nixl.memory.rank_memory import INLINE_DIGEST_BYTES, DigestThread, NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan, PromptLoad, WaitingRequest
from hybridkv.peers.digests import DigestRuns, digest_runs
from kits.peers.in_memory import InMemoryTransport, World

NUM_TOKENS = 23


def runs(*sizes: int) -> DigestRuns:
    """Consecutive runs from the first byte on, with a digest for each."""
    num_bytes = np.array(sizes, dtype=np.int64)
    zeros = np.zeros_like(num_bytes)
    return DigestRuns(zeros, np.cumsum(num_bytes) - num_bytes, num_bytes, np.arange(1, len(sizes) + 1))


def past(num_bytes: int) -> DigestRuns:
    """Runs that leave the region with their last byte."""
    whole = runs(num_bytes)
    return DigestRuns(whole.regions, whole.offsets + INLINE_DIGEST_BYTES + 1 - num_bytes, whole.num_bytes, whole.ends)


def test_few_bytes_are_digested_inline_and_more_on_a_thread_that_wakes_the_agent() -> None:
    page = (np.arange(INLINE_DIGEST_BYTES + 1) % 251).astype(np.uint8)
    memory = NixlRankMemory([MemoryRegion(page.ctypes.data, page.nbytes)], 1)
    woken = threading.Event()
    digester = DigestThread(memory, woken.set)
    few = digester.start_digests(runs(100, INLINE_DIGEST_BYTES - 100))
    assert few is not None and few.is_done and not woken.is_set()
    more = digester.start_digests(runs(100, INLINE_DIGEST_BYTES - 99))
    assert more is not None
    assert woken.wait(WAIT_S) and more.is_done, "it is done when the agent is woken"
    assert few.value is not None and more.value is not None
    assert few.value[0] == more.value[0] and few.value[1] != more.value[1]
    digester.close()


def test_failed_digests_end_with_their_error_inline_and_on_the_thread() -> None:
    page = np.zeros(INLINE_DIGEST_BYTES, dtype=np.uint8)  # `past` ends one byte after it
    memory = NixlRankMemory([MemoryRegion(page.ctypes.data, page.nbytes)], 1)
    woken = threading.Event()
    digester = DigestThread(memory, woken.set)
    outcomes = [digester.start_digests(gone) for gone in (past(1), past(INLINE_DIGEST_BYTES + 1))]
    assert woken.wait(WAIT_S)
    for outcome in outcomes:
        assert outcome is not None and isinstance(outcome.error, ValueError)
    digester.close()


def test_waiting_digests_are_not_prepared_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both sides check every millisecond whether the thread has room."""
    monkeypatch.setattr(rank_memory, "MAX_QUEUED", 1)
    monkeypatch.setattr(rank_memory, "INLINE_DIGEST_BYTES", -1)
    may_digest, calls, turns = threading.Event(), Counter[str](), Counter[Agent]()
    digests, turn = NixlRankMemory.digests, Agent._turn

    def digests_late(memory: NixlRankMemory, asked: DigestRuns) -> list[bytes]:
        assert may_digest.wait(WAIT_S)
        return digests(memory, asked)

    def counted_turn(agent: Agent, busy_s: float, idle_s: float) -> None:
        turns[agent] += 1
        turn(agent, busy_s, idle_s)

    def counted(name: str, *given: Any) -> Any:
        calls[name] += 1
        return digest_runs(*given)

    monkeypatch.setattr(NixlRankMemory, "digests", digests_late)
    monkeypatch.setattr(Agent, "_turn", counted_turn)
    for module in (lease_server, rank_read):
        monkeypatch.setattr(module, "digest_runs", partial(counted, module.__name__))
    world = World()
    producer, consumer = (Engine.start(Side(), lambda name: InMemoryTransport(name, world)) for _ in range(2))
    tables = tables_of(Side(), NUM_TOKENS)
    write_prompt(producer, tables, NUM_TOKENS)
    prompt = hand_over(producer, "p", tables, NUM_TOKENS)
    names = ("a", "b", "c", "d")
    loads = [PromptLoad(name, prompt, NUM_TOKENS, 0, tables) for name in names]
    consumer.submit(lambda: NixlStepPlan(waiting=[WaitingRequest(name, prompt) for name in names], loads=loads))
    agents = [engine.ranks[0].agent for engine in (producer, consumer)]
    consumer.ranks[0].until(lambda _: len(calls) == 2 and min(calls.values()) >= len(names))
    later = {agent: turns[agent] + 100 for agent in agents}
    consumer.ranks[0].until(lambda _: all(turns[agent] >= later[agent] for agent in agents))
    # Once at first, and once when there is room: the thread may take the first only after the second was refused.
    assert max(calls.values()) <= 2 * len(names)
    may_digest.set()
    assert [failures(consumer, name) for name in names] == [[None]] * len(names)
    consumer.close()
    producer.close()


def is_awake(rank: Rank) -> bool:
    return rank.agent._server.is_busy


def test_a_producer_polls_until_a_new_consumer_has_read() -> None:
    world = World()
    side = Side()
    producer = Engine.start(side, lambda name: InMemoryTransport(name, world))
    consumer = Engine.start(side, lambda name: InMemoryTransport(name, world))
    (theirs,) = producer.ranks
    tables = tables_of(side, NUM_TOKENS)
    write_prompt(producer, tables, NUM_TOKENS)
    prompt = hand_over(producer, "p", tables, NUM_TOKENS)
    assert not is_awake(theirs)
    # The request waits in the queue; its consumer has connected, and has read nothing.
    consumer.submit(lambda: NixlStepPlan(waiting=[WaitingRequest("d", prompt)]))
    theirs.until(lambda results: is_awake(theirs))
    load(consumer, "d", prompt, tables)
    assert failures(consumer, "d") == [None]
    theirs.until(lambda results: "p" in results.released)
    assert not is_awake(theirs)
    consumer.close()
    producer.close()
