"""The peer connector below HybridMultiConnector: the parent's admission gate holds the loads of all children.

Both roles are built through vLLM's factory. The tests set the results of the store beside it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import stores
from multi_engine import build, configure, entry
from test_peer_decisions import FULL, handed_over
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from hybridkv.connectors.vllm import PEER_CONNECTOR

NUM_TOKENS = 80
NEEDED_BLOCKS = 6
"""Blocks for a request of this many tokens: five, and one more to be scheduled."""
PEERS = {"weights_digest": "none"}


class Engine:
    """The scheduler side of an engine with a store, the peer connector and this many blocks."""

    def __init__(self, num_blocks: int, started: list[Any]) -> None:
        peers = {"kv_connector": PEER_CONNECTOR, "kv_connector_extra_config": PEERS}
        self.connector = build(configure(entry("RecordingConnector"), peers, mix=FULL))
        started.append(self.connector)
        self.store: stores.RecordingConnector = self.connector.sub_connectors[0]
        # The engine reserves one block for itself.
        pool: Any = SimpleNamespace(num_gpu_blocks=num_blocks + 1, get_num_free_blocks=lambda: num_blocks)
        self.connector.bind_gpu_block_pool(pool)
        self._started = started

    def request(self, name: str, child: str) -> Request:
        """Exactly one child holds its tokens."""
        params = handed_over(FULL, NUM_TOKENS, self._started) if child == "peers" else None
        extra = {"kv_transfer_params": params}
        request = Request(name, list(range(1, NUM_TOKENS + 1)), SamplingParams(max_tokens=8, extra_args=extra), None)
        self.connector.on_new_request(request)
        return request

    def ask(self, request: Request, child: str) -> tuple[int | None, bool]:
        self.store.answers["get_num_new_matched_tokens"] = (64, True) if child == "store" else (0, False)
        answer: tuple[int | None, bool] = self.connector.get_num_new_matched_tokens(request, 0)
        return answer

    def admit(self, request: Request, num_tokens: int) -> None:
        blocks = KVCacheBlocks(([KVCacheBlock(10 + i) for i in range(5)],))
        self.connector.update_state_after_alloc(request, blocks, num_tokens)

    def load(self, request: Request, child: str) -> None:
        num_tokens, is_async = self.ask(request, child)
        assert num_tokens and is_async
        self.admit(request, num_tokens)

    def schedule(self, *names: str) -> None:
        step = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in names],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_output_tokens=[]),
            preempted_req_ids=None,
            finished_req_ids=set(),
            kv_connector_block_state=None,
        )
        self.connector.build_connector_meta(step)


@pytest.mark.parametrize("second", ["store", "peers"])
@pytest.mark.parametrize("first", ["store", "peers"])
def test_of_two_loads_that_need_one_block_too_many_one_waits(first: str, second: str, started: list[Any]) -> None:
    """For any child. The load waits: the prompt is not computed while a producer holds it, even if another child has
    none."""
    engine = Engine(2 * NEEDED_BLOCKS - 1, started)
    engine.load(engine.request("a", first), first)
    waiting = engine.request("b", second)
    for _ in range(3):
        assert engine.ask(waiting, second) == (None, False)
    engine.connector.update_connector_output(KVConnectorOutput(finished_recving={"a"}))
    assert engine.ask(waiting, second) == (None, False), "loaded blocks stay reserved until the request is scheduled"
    engine.schedule("a")
    num_tokens, is_async = engine.ask(waiting, second)
    assert num_tokens and is_async


@pytest.mark.parametrize("second", ["store", "peers"])
@pytest.mark.parametrize("first", ["store", "peers"])
def test_two_loads_that_fit_together_do_not_wait(first: str, second: str, started: list[Any]) -> None:
    engine = Engine(2 * NEEDED_BLOCKS, started)
    engine.load(engine.request("a", first), first)
    engine.load(engine.request("b", second), second)


def test_a_failed_load_delays_no_other_once_its_request_has_ended(started: list[Any]) -> None:
    engine = Engine(2 * NEEDED_BLOCKS - 1, started)
    failed, waiting = engine.request("a", "peers"), engine.request("b", "peers")
    engine.load(failed, "peers")
    engine.connector.update_connector_output(KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"}))
    assert engine.ask(waiting, "peers") == (None, False), "the engine still reserves blocks for it"
    engine.connector.request_finished_all_groups(failed, ([10, 11, 12, 13, 14],))
    assert engine.ask(waiting, "peers") == (NUM_TOKENS - 1, True)
