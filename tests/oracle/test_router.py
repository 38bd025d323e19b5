"""A subscriber that receives only KV events predicts the restored tokens of each request exactly."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import msgspec
import patience
import pytest
import zmq
from kv_router import Publisher, Router
from vllm.distributed.kv_events import BlockRemoved, EventBatch, KVEventBatch, ZmqEventPublisher

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR, register
from hybridkv.planner import Announcer
from hybridkv.tiers import Changes, ReportsChanges
from oracle.disk_tier import stack_of
from oracle.engine import OracleEngine
from oracle.mixes import DEEPSEEK_V4, GEMMA3, GPT_OSS, QWEN3_NEXT, Mix
from oracle.rings import but_full
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from pathlib import Path

STORES = but_full(
    itertools.product((QWEN3_NEXT, GEMMA3, GPT_OSS, DEEPSEEK_V4), ("ram", "ram and disk")),
    (QWEN3_NEXT, "ram and disk"),
    (GEMMA3, "ram and disk"),
    (DEEPSEEK_V4, "ram"),
)
REQUESTS = round(500 * float(os.environ.get("ORACLE_SCENARIOS_FACTOR", "0.25")))
LONGEST = 6
"""Chunks of a prompt. Memory has room for more, so chunks found on disk always fit."""


TRIES = 400
"""Until a subscriber has joined: it does not receive earlier messages."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def connector(mix: Mix, chunks: int, disk: Path | None = None, **keys: str) -> Connector:
    tiers = [{"type": "ram", "capacity": chunks * 4096 * (len(mix.groups) + 1)}]
    if disk is not None:
        tiers.append({"type": "disk", "path": str(disk), "capacity": "5MiB", "fsync": "none", "direct": False})
    config = {"chunk_tokens": mix.alignment_tokens, "tiers": tiers, "weights_digest": "oracle", "load": "sync"}
    return Connector(CONNECTOR, config | keys)


def engine_of(mix: Mix, store: Connector, kv_events: bool = True) -> tuple[OracleEngine, Publisher]:
    settings = EngineSettings(num_blocks=1200, max_step_tokens=1024, connector=store, kv_events=kv_events)
    engine, publisher = OracleEngine(mix, settings), Publisher()
    engine.scheduler.kv_event_publisher = publisher  # type: ignore[assignment]
    return engine, publisher


class Prompts:
    """Prompts with common beginnings: turns that continue, branches anywhere, and new ones."""

    def __init__(self, mix: Mix, seed: int, most: int = 40) -> None:
        self._chunk, self._draw, self._most = mix.alignment_tokens, Random(seed), most
        self._made: list[list[int]] = []

    def next(self) -> list[int]:
        draw, chunk = self._draw, self._chunk
        stem: list[int] = []
        if self._made and draw.random() < 0.85:
            known = draw.choice(self._made)
            cut = draw.choice(
                (len(known), draw.randrange(len(known) + 1), draw.randrange(1 + len(known) // chunk) * chunk)
            )
            stem = known[:cut]
        room = LONGEST * chunk - len(stem)
        fresh = draw.choice((0, 1, chunk // 2, chunk, draw.randrange(1, 3 * chunk)))
        fresh = max(min(room, fresh), 0 if stem else 1)
        made = [*stem, *(draw.randrange(200) for _ in range(fresh))]
        self._made.append(made)
        if len(self._made) > self._most:
            self._made.pop(draw.randrange(len(self._made)))
        return made


class Restored:
    """Restored tokens of requests, to compare with predictions."""

    def __init__(self, engine: OracleEngine) -> None:
        self.engine = engine
        self.num_requests = 0
        self.hits: Counter[bool] = Counter()

    def ask(self, prompt: list[int], num_outputs: int = 1, reset: bool = False) -> int:
        """Tokens that come from the tiers, with an empty cache of the engine: emptied block by block, or by a reset."""
        engine = self.engine
        pool = engine.scheduler.kv_cache_manager.block_pool
        if reset:
            engine.reset_prefix_cache()
        else:
            pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
        before = engine.restored_tokens
        self.num_requests += 1
        engine.submit(f"request-{self.num_requests}", prompt, num_outputs)
        engine.drain()
        engine.check_idle()
        restored = engine.restored_tokens - before
        self.hits[restored > 0] += 1
        return restored


@pytest.mark.parametrize(("mix", "tiers"), STORES, ids=lambda value: getattr(value, "name", value))
def test_the_restored_tokens_of_each_request_are_predicted_from_events(mix: Mix, tiers: str, tmp_path: Path) -> None:
    disk = tmp_path / "store" if tiers != "ram" else None
    engine, publisher = engine_of(mix, connector(mix, 3 * LONGEST, disk))
    routers = [Router(clears=True), Router(clears=False)]
    publisher.listeners += [router.hear for router in routers]
    draw, prompts = Random(3), Prompts(mix, seed=len(mix.name))
    with engine:
        restored = Restored(engine)
        for _ in range(REQUESTS):
            prompt = prompts.next()
            predicted = [router.predict(prompt) for router in routers]
            by_states = [router.predict_by_states(prompt) for router in routers] if mix.has_recurrent else predicted
            by_attention = routers[0].predict_by_attention(prompt)
            tokens = restored.ask(prompt, draw.choice((1, 1, 2, 9)), reset=draw.random() < 0.1)
            assert predicted == by_states == [tokens, tokens] <= [by_attention] * 2, restored.num_requests
            if draw.random() < 0.01:
                engine.reset_connector()
                restored.ask([1])  # nothing is published without a step
    assert min(restored.hits.values()) > REQUESTS / 10, restored.hits
    told = routers[0].num_events
    assert min(told["BlockStored CPU"], told["BlockRemoved CPU"]) > REQUESTS, told
    assert disk is None or told["BlockStored STORAGE"] > REQUESTS, told


def overestimate(mix: Mix, store: Connector, num_requests: int = 150) -> tuple[int, int]:
    """Tokens that a router with attention scores alone expects beyond the restored ones, and the restored ones."""
    engine, publisher = engine_of(mix, store)
    router = Router()
    publisher.listeners.append(router.hear)
    prompts, beyond, total = Prompts(mix, seed=1), 0, 0
    with engine:
        restored = Restored(engine)
        for _ in range(num_requests):
            prompt = prompts.next()
            predicted, exact = router.predict_by_attention(prompt), router.predict(prompt)
            tokens = restored.ask(prompt)
            assert exact == tokens <= predicted
            beyond, total = beyond + predicted - tokens, total + tokens
    return beyond, total


def test_announcing_every_stored_chunk_makes_routers_overestimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every stored chunk is announced. Routers with attention scores alone then take it for a hit."""
    # Stops would leave states at most places where prompts diverge.
    store = connector(QWEN3_NEXT, 3 * LONGEST, checkpoints="off")
    beyond, total = overestimate(QWEN3_NEXT, store)
    with monkeypatch.context() as patch:
        patch.setattr(Announcer, "_needed", lambda self, node: -1)
        beyond_of_all, total_of_all = overestimate(QWEN3_NEXT, store)
    assert total == total_of_all > 0
    assert beyond_of_all > 2 * beyond, (beyond, beyond_of_all)


def test_a_router_that_loses_one_removal_is_wrong() -> None:
    engine, publisher = engine_of(GPT_OSS, connector(GPT_OSS, 2 * LONGEST))
    chunk = GPT_OSS.alignment_tokens
    first = [1] * (2 * chunk + 1)
    lost: list[BlockRemoved] = []

    def keeps(event: object) -> bool:
        is_lost = isinstance(event, BlockRemoved) and event.medium == "CPU" and not lost and begins(event)
        if is_lost:
            assert isinstance(event, BlockRemoved)
            lost.append(event)
        return not is_lost

    def begins(event: BlockRemoved) -> bool:
        return event.group_idx == 1 and whole.path_of(first)[:1] == event.block_hashes

    # The lossy one receives first, so that the other still knows the blocks.
    lossy, whole = Router(keeps=keeps), Router()
    publisher.listeners += [lossy.hear, whole.hear]
    with engine:
        restored = Restored(engine)
        restored.ask(first)
        assert lossy.predict_by_attention(first) == whole.predict_by_attention(first) == 2 * chunk
        draw = Random(1)
        while whole.predict_by_attention(first):
            restored.ask([draw.randrange(200) for _ in range(LONGEST * chunk)])
        assert len(lost) == 1
        assert lossy.predict_by_attention(first) == chunk
        publisher.listeners.clear()
        assert restored.ask(first) == 0


def test_events_arrive_over_a_socket_as_published() -> None:
    """The real publisher, and a subscriber on loopback."""
    engine, published = engine_of(QWEN3_NEXT, connector(QWEN3_NEXT, 3 * LONGEST))
    publisher = ZmqEventPublisher(0, endpoint="tcp://127.0.0.1:*")
    heard, sent = Router(), Router()
    published.listeners.append(sent.hear)

    class Both(Publisher):
        def publish(self, events: EventBatch) -> None:
            published.publish(events)
            publisher.publish(events)

    engine.scheduler.kv_event_publisher = Both()  # type: ignore[assignment]
    assert publisher._pub is not None
    with zmq.Context.instance().socket(zmq.SUB) as subscriber, engine:
        subscriber.connect(publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT))
        subscriber.subscribe(b"")
        for _ in range(TRIES):
            publisher.publish(KVEventBatch(ts=0.0, events=[]))
            if subscriber.poll(50):
                break
        else:
            pytest.fail("the subscriber receives nothing")
        restored, prompts = Restored(engine), Prompts(QWEN3_NEXT, seed=2)
        for _ in range(20):
            restored.ask(prompts.next())
        publisher.publish(KVEventBatch(ts=-1.0, events=[]))
        ts = 0.0
        while ts >= 0.0:
            assert subscriber.poll(int(1000 * patience.seconds(6.0))), "the last batch never came"
            payload = subscriber.recv_multipart()[-1]
            heard.hear(payload)
            ts = msgspec.msgpack.decode(payload)[0]
        publisher.shutdown()
    assert heard.held == sent.held
    assert heard.held
    assert heard.num_events == sent.num_events


def test_a_subscriber_that_binds_receives_nothing_before_its_first_receive() -> None:
    """The engine connects to an endpoint without a star. The waiting socket sends its subscription only while its owner
    is in a call of it; until then everything is dropped by the sender, without a report."""
    with zmq.Context.instance().socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        publisher = ZmqEventPublisher(0, endpoint=f"tcp://127.0.0.1:{port}")
        number, heard = 0, -1
        while heard < 0:
            assert number < TRIES
            publisher.publish(KVEventBatch(ts=float(number), events=[]))
            publisher._event_queue.join()  # sent by now
            if subscriber.poll(50):
                heard = int(msgspec.msgpack.decode(subscriber.recv_multipart()[-1])[0])
            number += 1
        assert heard > 0, "the first one was sent before the subscription"
        publisher.shutdown()


def test_nothing_is_watched_without_kv_events() -> None:
    engine, publisher = engine_of(GPT_OSS, connector(GPT_OSS, LONGEST), kv_events=False)
    with engine:
        Restored(engine).ask([1] * 40)
        assert engine.scheduler_connector is not None
        assert list(engine.scheduler_connector.take_events()) == []
        near = stack_of(engine).primary
        assert isinstance(near, ReportsChanges)
        assert near.num_keys > 0 and near.take_changes() == Changes(set(), False)
    assert publisher.num_batches == 0


def test_a_reset_of_the_connector_removes_its_blocks_and_clears_nothing_else() -> None:
    engine, publisher = engine_of(QWEN3_NEXT, connector(QWEN3_NEXT, 3 * LONGEST))
    router = Router()
    publisher.listeners.append(router.hear)
    with engine:
        restored = Restored(engine)
        restored.ask([1] * 100)
        assert router.held
        engine.reset_connector()
        restored.ask([2])
        assert not router.held
    assert not any(name.startswith("AllBlocksCleared") for name in router.num_events)


def test_chunks_of_an_old_disk_are_announced_when_a_request_uses_them(tmp_path: Path) -> None:
    prompt = [1] * (4 * QWEN3_NEXT.alignment_tokens + 1)
    for is_first in (True, False):
        engine, publisher = engine_of(QWEN3_NEXT, connector(QWEN3_NEXT, 3 * LONGEST, tmp_path / "store"))
        router = Router()
        publisher.listeners.append(router.hear)
        with engine:
            restored = Restored(engine)
            restored.ask([2])
            assert not router.held
            tokens = restored.ask(prompt)
            assert tokens == (0 if is_first else len(prompt) - 1)
            assert router.predict(prompt) == len(prompt) - 1
            assert router.num_events["BlockStored STORAGE"] > 0


def test_a_block_of_two_children_is_removed_when_the_last_one_evicts_it() -> None:
    """The small child evicts blocks that the large one keeps; a subscriber receives each block once."""
    mix = GPT_OSS
    children = [
        {"kv_connector": store.name, "kv_connector_extra_config": store.extra_config}
        for store in (connector(mix, LONGEST), connector(mix, 100 * LONGEST))
    ]
    store = Connector(MULTI_CONNECTOR, {"connectors": children, "lookup_timeout_seconds": 0})
    engine, publisher = engine_of(mix, store)
    router = Router()
    publisher.listeners.append(router.hear)
    with engine:
        restored, prompts = Restored(engine), Prompts(mix, seed=5)
        for number in range(120):
            prompt = prompts.next()
            predicted = router.predict(prompt)
            assert predicted == restored.ask(prompt, reset=number % 10 == 9)
        assert engine.scheduler_connector is not None
        small, large = engine.scheduler_connector.sub_connectors  # type: ignore[attr-defined]
        held = [child._scheduler._stack.primary.num_keys for child in (small, large)]
    assert 0 < held[0] < held[1], "the small one evicted nothing"
    assert restored.hits[True] > 10
