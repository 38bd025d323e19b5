"""A router that only receives the events of a real engine predicts exactly how many tokens each request restores.

vLLM's own publisher sends, and a ZeroMQ socket receives. The engine's own blocks arrive on the same socket, as another
medium.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import msgspec
import pytest
import zmq
from harness import Engine, make_prompt
from kv_router import TIERS, Router
from vllm.distributed.kv_events import BlockStored, KVEventBatch

BLOCK = 128
RAM_BYTES, DISK_BYTES = 2 << 20, 12 << 20
FILLERS, MOST_ROUNDS = 3, 40
decoder = msgspec.msgpack.Decoder(KVEventBatch)
JOIN_MS, HEAR_MS = 200, 60_000
TRIES = 200
"""Attempts until a subscriber has joined; it misses earlier messages."""
UNSEEN = {"hybridkv_hints": {"store": False, "load": False}}
"""Parameters of a request that does not change the tiers."""


@pytest.fixture(scope="module")
def kv_transfer_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    disk: Path = harness.scratch_directory(tmp_path_factory.mktemp("disk")) / "kv"
    tiers = [
        {"type": "ram", "capacity": RAM_BYTES},
        {"type": "disk", "path": str(disk), "capacity": DISK_BYTES, "fsync": "none", "direct": False},
    ]
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": tiers, "chunk_tokens": BLOCK, "compute_tokens_per_second": 200},
    }


@pytest.fixture(scope="module")
def kind() -> str:
    return "qwen3-next"


@pytest.fixture(scope="module")
def engine_arguments() -> dict[str, Any]:
    # With the star the engine binds the socket; without it, it would connect to the endpoint.
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:*"}
    return {"kv_events_config": events}


@dataclass
class Subscriber:
    """The routers of one engine, fed from its event socket."""

    engine: Engine
    socket: zmq.Socket[bytes]
    routers: dict[str, Router]
    media: set[str] = field(default_factory=set)
    """Media that occurred in events."""
    next_batch: int | None = None
    num_marks: int = 0

    def mark(self) -> list[int]:
        """Run a new prompt whose events separate earlier events from later ones."""
        self.num_marks += 1
        prompt = make_prompt(BLOCK + 1, seed=900_000 + self.num_marks)
        self.engine.add(prompt, max_tokens=1, kv_transfer_params=UNSEEN)
        self.engine.run()
        self.engine.drain()
        return prompt[:BLOCK]

    def join(self) -> None:
        for _ in range(TRIES):
            mark = self.mark()
            while self.socket.poll(JOIN_MS):
                if self._hear(mark):
                    return
        raise TimeoutError("no event of the engine arrived")

    def catch_up(self) -> None:
        """Receive all events that the engine has published so far."""
        mark = self.mark()
        while self.socket.poll(HEAR_MS):
            if self._hear(mark):
                return
        raise TimeoutError("the engine's last events never arrived")

    def _hear(self, mark: list[int]) -> bool:
        """Receive one batch. Whether it is from the step that computed the marked block."""
        _, number, payload = self.socket.recv_multipart()
        batch = int.from_bytes(number, "big")
        assert self.next_batch in (None, batch), "batches were lost"
        self.next_batch = batch + 1
        for router in self.routers.values():
            router.hear(payload)
        stored = [event for event in decoder.decode(payload).events if isinstance(event, BlockStored)]
        self.media |= {str(event.medium) for event in stored}
        return any(event.medium == "GPU" and list(event.token_ids) == mark for event in stored)


@pytest.fixture(scope="module")
def subscriber(engine: Engine) -> Iterator[Subscriber]:
    publisher = engine.scheduler.kv_event_publisher
    routers = {
        "all": Router(),
        "deaf to clearing": Router(clears=False),
        **{medium: Router(media=(medium,)) for medium in TIERS},
    }
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.subscribe(b"")
        socket.connect(publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT))
        heard = Subscriber(engine, socket, routers)
        heard.join()
        yield heard


@dataclass(frozen=True)
class Prediction:
    """One request: the predictions of each router, and the restored tokens.

    Attributes:
        by_states: prediction from the blocks of one recurrent group only.
        by_attention: prediction from the blocks of full attention only.
    """

    restored: int
    predicted: dict[str, int]
    by_states: int
    by_attention: int


@pytest.fixture(scope="module")
def asked(engine: Engine, subscriber: Subscriber) -> dict[str, Prediction]:
    """Requests one after the other. The engine forgets its own cache before each."""
    stem = make_prompt(5 * BLOCK + BLOCK // 2, seed=1)
    first, second, third = (make_prompt(7 * BLOCK, seed=10 + i, prefix=stem) for i in range(3))
    branch = make_prompt(8 * BLOCK + 5, seed=20, prefix=second[: 6 * BLOCK + 7])
    found: dict[str, Prediction] = {}
    seeds = itertools.count(100)

    def ask(name: str, prompt: list[int]) -> None:
        engine.reset_prefix_cache()
        subscriber.catch_up()
        predicted = {who: router.predict(prompt) for who, router in subscriber.routers.items()}
        everything = subscriber.routers["all"]
        alone = everything.predict_by_states(prompt), everything.predict_by_attention(prompt)
        [result] = engine.generate([prompt])
        found[name] = Prediction(result.num_cached_tokens, predicted, *alone)

    ask("cold", first)
    ask("the same", first)
    ask("sibling", second)
    ask("second sibling", third)
    ask("branch of a sibling", branch)
    ask("parts early", make_prompt(4 * BLOCK, seed=30, prefix=first[: 2 * BLOCK + 9]))
    for medium in TIERS:
        for _ in range(MOST_ROUNDS):
            subscriber.catch_up()
            if not subscriber.routers[medium].predict(first):
                break
            for _ in range(FILLERS):
                engine.generate([make_prompt(2 * BLOCK, seed=next(seeds))], max_tokens=1)
        ask(f"evicted from {medium}", first)
    return found


def test_routers_predict_the_restored_tokens_of_each_request(asked: dict[str, Prediction]) -> None:
    for name, each in asked.items():
        assert each.predicted["all"] == each.predicted["deaf to clearing"] == each.restored, (name, each)
    restored = {name: each.restored // BLOCK for name, each in asked.items()}
    # Both prompts share at most this many blocks. Guessed stops, which depend on the machine's speed, decide where
    # states lie.
    assert restored.pop("sibling") <= 5
    assert restored.pop("parts early") <= 2
    # When host memory has lost the prompt, the disk may have evicted a part of its end too.
    assert 0 < restored.pop("evicted from CPU") <= 6
    assert restored == {
        "cold": 0,
        "the same": 6,
        "second sibling": 5,
        "branch of a sibling": 6,
        "evicted from STORAGE": 0,
    }


def test_a_router_that_scores_one_recurrent_group_is_exact(asked: dict[str, Prediction]) -> None:
    for name, each in asked.items():
        assert each.by_states == each.restored, (name, each)


def test_a_router_that_scores_full_attention_is_exact_for_continued_prompts(asked: dict[str, Prediction]) -> None:
    """For a prompt that leaves a stored one between two states, it predicts all tokens that both share."""
    shared = {"sibling": 5 * BLOCK, "parts early": 2 * BLOCK}
    for name, each in asked.items():
        assert each.by_attention == shared.get(name, each.restored) >= each.restored, (name, each)


def test_a_router_without_events_of_the_disk_is_wrong(asked: dict[str, Prediction]) -> None:
    """Control: blocks that memory evicted are still on the disk."""
    each = asked["evicted from CPU"]
    assert each.predicted["CPU"] == 0 < each.predicted["STORAGE"] == each.restored
    assert asked["the same"].predicted["CPU"] == asked["the same"].restored


def test_the_engines_own_blocks_are_published_as_another_medium(
    asked: dict[str, Prediction], subscriber: Subscriber
) -> None:
    assert asked
    assert subscriber.media == {"GPU", *TIERS}
