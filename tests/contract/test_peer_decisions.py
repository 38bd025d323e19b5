"""Results of the peer connector for vLLM's scheduler, and its messages to workers, request by request.

The requests, blocks and groups are vLLM's own. tests/oracle/test_peers.py runs whole lives of them.
"""

from __future__ import annotations

import ast
import inspect
import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import patience
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pull_scheduler
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from hybridkv.connectors.vllm import PEER_CONNECTOR
from hybridkv.connectors.vllm.common.identity import adapters
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan, PromptLoad, WorkerAddress
from oracle.mixes import GEMMA3, LLAMA4, QWEN3_NEXT, Group, Kind, Mix
from oracle.settings import Configs, Connector, EngineSettings, make_configs

FULL = Mix("full", (Group(Kind.FULL, 16),))
WINDOW = Mix("window", (Group(Kind.WINDOW, 16, reach_tokens=24), Group(Kind.FULL, 16)))
WINDOW_IN_LARGER_BLOCKS = Mix("window", (Group(Kind.WINDOW, 32, reach_tokens=24), Group(Kind.FULL, 32)))
CHUNKED = Mix("chunked", (Group(Kind.CHUNKED, 16, reach_tokens=48), Group(Kind.FULL, 16)))
SOON_S = patience.seconds(6.0)
HOUR_NS = 3600 * 10**9
PRODUCE = {"do_remote_decode": True, "do_remote_prefill": False}


class Half:
    """The scheduler side of an engine."""

    def __init__(self, mix: Mix, role: str, started: list[Any], **extra: Any) -> None:
        config: Mapping[str, Any] = {"weights_digest": "none", **extra}
        connector = Connector(PEER_CONNECTOR, config, role=role)
        configs: Configs = make_configs(mix, EngineSettings(num_blocks=64, connector=connector))
        with set_current_vllm_config(configs.vllm):
            self.connector: Any = KVConnectorFactory.create_connector(
                configs.vllm, KVConnectorRole.SCHEDULER, configs.scheduler
            )
        started.append(self.connector)
        self.connector.set_xfer_handshake_metadata({0: WorkerAddress(14579, "rank 0")})
        self.block_tokens = [group.block_tokens for group in mix.groups]

    def request(
        self,
        name: str,
        num_tokens: int,
        params: dict[str, Any] | None,
        lora: LoRARequest | None = None,
        **sampling: Any,
    ) -> Request:
        extra = {"kv_transfer_params": params} if params is not None else None
        parameters = SamplingParams(**{"max_tokens": 8, "extra_args": extra, **sampling})
        request = Request(name, list(range(1, num_tokens + 1)), parameters, None, lora_request=lora)
        self.connector.on_new_request(request)
        return request

    def blocks(self, num_tokens: int) -> tuple[list[int], ...]:
        """The blocks that the engine allocates: 10, 11, ... of the first group, 110, ... of the second."""
        counts = [-(-num_tokens // size) for size in self.block_tokens]
        return tuple([100 * g + 10 + i for i in range(count)] for g, count in enumerate(counts))

    def admit(self, request: Request, external_tokens: int) -> None:
        """The engine allocates blocks for the request."""
        blocks = tuple([KVCacheBlock(each) for each in ids] for ids in self.blocks(request.num_tokens))
        self.connector.update_state_after_alloc(request, KVCacheBlocks(blocks), external_tokens)

    def finish(self, request: Request, status: RequestStatus, tables: Any = None) -> tuple[bool, Any]:
        request.status = status
        request.num_computed_tokens = request.num_prompt_tokens
        blocks = tables or self.blocks(request.num_prompt_tokens)
        answer: tuple[bool, Any] = self.connector.request_finished_all_groups(request, blocks)
        return answer

    def plan(self, preempted: Collection[str] = ()) -> NixlStepPlan:
        step = SimpleNamespace(
            num_scheduled_tokens={}, preempted_req_ids=preempted, finished_req_ids=set(), kv_connector_block_state=None
        )
        plan = self.connector.build_connector_meta(step)
        assert isinstance(plan, NixlStepPlan)
        return plan


def handed_over(mix: Mix, num_tokens: int, started: list[Any]) -> dict[str, Any]:
    """The parameters that a producer returns for a prompt."""
    half = Half(mix, "kv_producer", started)
    request = half.request("p", num_tokens, dict(PRODUCE))
    half.admit(request, 0)
    holds, params = half.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert holds and isinstance(params, dict)
    return params


def test_the_parameters_are_those_of_vllms_connector_plus_one(started: list[Any]) -> None:
    """Taken from its source: the parameters that proxies pass on, and those left out because this version has one size
    of each, or because a producer registers its memory once."""
    source = ast.parse(inspect.getsource(pull_scheduler))
    returned = [
        {str(keyword.arg) for keyword in call.keywords}
        for call in ast.walk(source)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "dict"
    ]
    (theirs,) = [keys for keys in returned if "remote_block_ids" in keys]
    left_out = {"dcp_size", "pp_size", "remote_blocks_expiry_time", "remote_registration_generation", "transfer_mode"}
    assert set(handed_over(WINDOW, 100, started)) == theirs - left_out | {"hybridkv"}


@pytest.mark.parametrize(
    ("num_tokens", "places"),
    [(497, range(13, 31)), (503, range(14, 32)), (101, range(7)), (24, range(2)), (17, range(1))],
)
def test_a_window_of_24_tokens_is_offered_with_the_255_tokens_before_it(
    num_tokens: int, places: range, started: list[Any]
) -> None:
    """A consumer with blocks of up to 256 tokens needs these tokens for its first block. The consumer computes the last
    token of the prompt."""
    params = handed_over(WINDOW, num_tokens, started)
    assert params["remote_num_tokens"] == num_tokens - 1
    assert params["remote_block_ids"][0] == [10 + place for place in places]
    assert params["hybridkv"]["first_blocks"][0] == places[0]
    assert len(params["remote_block_ids"][1]) == -(-(num_tokens - 1) // 16), "full attention sends all"


@pytest.mark.parametrize(("num_tokens", "places"), [(97, []), (98, [6]), (70, [3, 4]), (49, [])])
def test_chunked_attention_sends_the_blocks_after_the_last_boundary(
    num_tokens: int, places: list[int], started: list[Any]
) -> None:
    params = handed_over(CHUNKED, num_tokens, started)
    assert params["remote_block_ids"][0] == [10 + place for place in places]


def test_a_recurrent_group_sends_one_state_and_no_draft_blocks(started: list[Any]) -> None:
    half = Half(QWEN3_NEXT, "kv_producer", started)
    request = half.request("p", 60, dict(PRODUCE))
    half.admit(request, 0)
    drafts = ([0, 0, 6, 7, 8, 9], [0, 0, 0, 3, 4, 5], [0, 0, 0, 2, 12, 13], [20, 21, 22, 23])
    _, params = half.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED, drafts)
    assert params["remote_block_ids"] == [[7], [3], [2], [20, 21, 22, 23]]


def test_a_partly_filled_last_block_is_handed_over(started: list[Any]) -> None:
    params = handed_over(FULL, 40, started)
    assert params["remote_num_tokens"] == 40 and params["remote_block_ids"] == [[10, 11, 12]]
    assert handed_over(FULL, 5, started)["remote_block_ids"] == [[10]]


@pytest.mark.parametrize(
    ("mix", "withheld"),
    [(FULL, 0), (WINDOW, 1), (CHUNKED, 1), (QWEN3_NEXT, 1), (GEMMA3, 1), (LLAMA4, 1)],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_consumer_computes_the_last_token_if_a_group_drops_read_blocks(
    mix: Mix, withheld: int, started: list[Any]
) -> None:
    half = Half(mix, "kv_producer", started)
    request = half.request("p", 60, dict(PRODUCE), max_tokens=128)
    assert request.num_prompt_tokens == len(request.all_token_ids) == 60 - withheld
    assert request.max_tokens == (1 if withheld else 128)
    half.connector.on_new_request(request)
    assert request.num_prompt_tokens == 60 - withheld, "it is cut once"
    kept = half.request("q", 60, dict(PRODUCE), prompt_logprobs=1)
    assert kept.num_prompt_tokens == 60, "its consumer computes all of it"
    params = handed_over(mix, 60, started)
    consumer = Half(mix, "kv_consumer", started)
    again = consumer.request("d", 60, params)
    assert consumer.connector.get_num_new_matched_tokens(again, 0) == (59, True)
    assert consumer.connector.get_num_new_matched_tokens(again, 32) == (27, True)


def test_a_prompt_is_cut_only_for_its_own_request(started: list[Any]) -> None:
    """In one process, the caller and other requests with the same prompt share the list."""
    half = Half(WINDOW, "kv_producer", started)
    given, is_token = list(range(60)), [True] * 50 + [False] * 10
    embeddings = torch.zeros(60, 4)
    parameters = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": dict(PRODUCE)})
    for name in ("p", "q"):
        request = Request(name, given, parameters, None, prompt_embeds=embeddings, prompt_is_token_ids=is_token)
        half.connector.on_new_request(request)
        assert request.num_prompt_tokens == len(request.all_token_ids) == 59
        parts: list[Any] = [request.prompt_token_ids, request.prompt_embeds, request.prompt_is_token_ids]
        assert [len(part) for part in parts] == [59] * 3
    assert [len(each) for each in (given, is_token, embeddings)] == [60] * 3


def test_a_full_local_hit_loads_nothing_and_notifies_the_producer(started: list[Any]) -> None:
    consumer = Half(WINDOW, "kv_consumer", started)
    request = consumer.request("d", 50, handed_over(WINDOW, 50, started))
    assert [each.request_id for each in consumer.plan().waiting] == ["d"]
    assert consumer.connector.get_num_new_matched_tokens(request, 49) == (0, False)
    consumer.admit(request, 0)
    plan = consumer.plan()
    assert (plan.loads, plan.ended) == ([], ["d"])
    assert not consumer.connector.has_pending_push_work()


def test_a_load_after_a_partial_local_hit_sends_whole_block_tables(started: list[Any]) -> None:
    """Whole block tables are sent, with the number of tokens: tokens decide which blocks of each group are read."""
    consumer = Half(QWEN3_NEXT, "kv_consumer", started)
    request = consumer.request("d", 60, handed_over(QWEN3_NEXT, 60, started))
    consumer.connector.get_num_new_matched_tokens(request, 32)
    consumer.admit(request, 27)
    (load,) = consumer.plan().loads
    assert isinstance(load, PromptLoad) and load.refused is None
    assert (load.num_tokens, load.computed_tokens) == (59, 32)
    assert load.block_ids == tuple(tuple(100 * g + 10 + i for i in range(4)) for g in range(4))
    assert [len(ids) for ids in load.prompt.block_ids] == [1, 1, 1, 4]


def with_freed_blocks(num_tokens: int, num_freed: int, started: list[Any]) -> dict[str, Any]:
    """Parameters for a prompt, after the producer's engine has freed the first blocks of the window."""
    half = Half(WINDOW, "kv_producer", started)
    request = half.request("p", num_tokens, dict(PRODUCE))
    half.admit(request, 0)
    window, full = half.blocks(request.num_prompt_tokens)
    tables = ([0] * num_freed + window[num_freed:], full)
    _, params = half.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED, tables)
    assert isinstance(params, dict)
    return params


def test_freed_blocks_that_larger_blocks_need_are_refused_before_a_load(started: list[Any]) -> None:
    """The window of 115 tokens begins with token 92, in the consumer's block of tokens 64 to 95."""
    for computed, num_freed, offer in ((0, 4, (115, True)), (0, 5, (0, False)), (96, 5, (19, True))):
        consumer = Half(WINDOW_IN_LARGER_BLOCKS, "kv_consumer", started)
        request = consumer.request("d", 116, with_freed_blocks(116, num_freed, started))
        assert consumer.connector.get_num_new_matched_tokens(request, computed) == offer
        assert consumer.connector.get_num_new_matched_tokens(request, computed) == offer
        consumer.admit(request, offer[0])
        plan = consumer.plan()
        assert [len(plan.loads), plan.ended] == ([1, []] if offer[1] else [0, ["d"]])
        if not offer[1]:
            stats = consumer.connector.get_kv_connector_stats()
            assert stats.reduce()["vllm:hybridkv_peer_prompts_total"] == 1


def test_a_request_aborted_before_admission_still_notifies_its_producer(started: list[Any]) -> None:
    consumer = Half(WINDOW, "kv_consumer", started)
    request = consumer.request("d", 50, handed_over(WINDOW, 50, started))
    consumer.plan()
    assert consumer.finish(request, RequestStatus.FINISHED_ABORTED) == (False, None)
    assert consumer.connector.has_pending_push_work(), "a step is needed to carry the message"
    assert consumer.plan().ended == ["d"]
    assert not consumer.connector.has_pending_push_work()


@pytest.mark.parametrize("mix", [FULL, QWEN3_NEXT], ids=lambda mix: mix.name)
def test_a_reset_ends_the_hand_overs_of_waiting_requests(mix: Mix, started: list[Any]) -> None:
    """The engine may have other weights after the reset."""
    params = handed_over(mix, 60, started)
    consumer = Half(mix, "kv_consumer", started)
    waiting, loading = consumer.request("d", 60, params), consumer.request("e", 60, params)
    assert consumer.connector.get_num_new_matched_tokens(loading, 0) == (59, True)
    consumer.admit(loading, 59)
    assert [load.request_id for load in consumer.plan().loads] == ["e"]
    assert consumer.connector.get_num_new_matched_tokens(waiting, 0) == (59, True)
    assert consumer.connector.reset_cache() is True
    assert consumer.connector.has_pending_push_work(), "a step is needed to carry the message"
    assert consumer.plan().ended == ["d"]
    assert consumer.connector.get_num_new_matched_tokens(waiting, 0) == (0, False)
    consumer.admit(waiting, 0)
    consumer.finish(waiting, RequestStatus.FINISHED_STOPPED)
    assert consumer.plan().is_empty, "the lease is released once"
    later = consumer.request("f", 60, params)
    assert consumer.connector.get_num_new_matched_tokens(later, 0) == (59, True)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (RequestStatus.FINISHED_ABORTED, "cancelled"),
        # With kv_load_failure_policy "fail" the engine ends the request before the connector gets the result of the
        # load.
        (RequestStatus.FINISHED_ERROR, "failed"),
        (RequestStatus.WAITING, "failed"),
    ],
)
def test_a_load_of_an_aborted_request_is_not_a_failure(status: RequestStatus, outcome: str, started: list[Any]) -> None:
    consumer = Half(WINDOW, "kv_consumer", started)
    request = consumer.request("d", 50, handed_over(WINDOW, 50, started))
    num_tokens, _ = consumer.connector.get_num_new_matched_tokens(request, 0)
    consumer.admit(request, num_tokens)
    assert len(consumer.plan().loads) == 1
    if status is not RequestStatus.WAITING:
        consumer.finish(request, status)
    ended = KVConnectorOutput(finished_recving={"d"}, failed_recving={"d"})
    consumer.connector.update_connector_output(ended)
    counters = consumer.connector.get_kv_connector_stats().data["counters"]
    prompts = [values for name, values, _ in counters if name == "vllm:hybridkv_peer_prompts_total"]
    assert [tuple(values) for values in prompts] == [(outcome,)]
    if status is RequestStatus.WAITING:
        answers = [consumer.connector.get_num_new_matched_tokens(request, 0)[0] for _ in range(2)]
        assert answers == [None, 0], "requests with blocks are scheduled first"


def test_blocks_that_another_connector_loads_lose_their_marks(started: list[Any]) -> None:
    producer = Half(FULL, "kv_producer", started)
    request = producer.request("p", 50, dict(PRODUCE))
    corruption = producer.connector._scheduler._producer.corrupt_blocks
    corruption._add(13)
    producer.admit(request, 0)
    assert not corruption.is_corrupt(13)


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "not sent"])
def test_an_aborted_request_does_not_end_the_lease_of_the_next_with_its_id(is_sent: bool, started: list[Any]) -> None:
    """Workers begin the waiting requests of a plan before they end others."""
    params = [handed_over(FULL, num_tokens, started) for num_tokens in (50, 60)]
    consumer = Half(FULL, "kv_consumer", started)
    aborted = consumer.request("d", 50, params[0])
    if is_sent:
        assert len(consumer.plan().waiting) == 1
    consumer.finish(aborted, RequestStatus.FINISHED_ABORTED)
    later = consumer.request("d", 60, params[1])
    assert consumer.connector.get_num_new_matched_tokens(later, 0) == (59, True)
    plan = consumer.plan()
    assert [each.prompt.num_tokens for each in plan.waiting] == ([60] if is_sent else [50, 60])
    assert plan.ended == []
    consumer.finish(later, RequestStatus.FINISHED_ABORTED)
    assert consumer.plan().ended == ["d"]


@pytest.mark.parametrize("mix", [FULL, QWEN3_NEXT], ids=lambda mix: mix.name)
def test_an_engine_acts_only_in_its_own_role(mix: Mix, started: list[Any]) -> None:
    """A prefill-only engine reads nothing, whatever a request contains, and a decode-only engine holds nothing."""
    params = handed_over(mix, 50, started)
    producer = Half(mix, "kv_producer", started)
    request = producer.request("p", 50, dict(params))
    assert producer.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    producer.admit(request, 0)
    assert producer.plan().is_empty
    consumer = Half(mix, "kv_consumer", started)
    other = consumer.request("d", 50, dict(PRODUCE))
    consumer.admit(other, 0)
    assert other.num_prompt_tokens == 50
    assert consumer.finish(other, RequestStatus.FINISHED_LENGTH_CAPPED) == (False, None)
    assert consumer.plan().is_empty
    both = Half(mix, "kv_both", started)
    assert both.connector.get_num_new_matched_tokens(both.request("d", 50, dict(params)), 0) == (49, True)
    third = both.request("p", 50, dict(PRODUCE))
    both.admit(third, 0)
    assert both.finish(third, RequestStatus.FINISHED_STOPPED)[0]


@pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED]
)
def test_a_prompt_that_ended_with_an_error_is_not_handed_over(status: RequestStatus, started: list[Any]) -> None:
    half = Half(WINDOW, "kv_producer", started)
    request = half.request("p", 50, dict(PRODUCE))
    half.admit(request, 0)
    half.plan()
    assert half.finish(request, status) == (False, None)
    assert half.plan().dropped == ["p"]


@pytest.mark.parametrize("mix", [FULL, WINDOW, QWEN3_NEXT], ids=lambda mix: mix.name)
def test_a_session_is_neither_cut_nor_handed_over(mix: Mix, started: list[Any]) -> None:
    """Its next input follows the prompt, and is not limited to one token."""
    half = Half(mix, "kv_producer", started)
    parameters = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": dict(PRODUCE)})
    session = Request("s", list(range(60)), parameters, None, resumable=True)
    half.connector.on_new_request(session)
    assert list(session.all_token_ids) == list(range(60)) and session.max_tokens == 8
    half.admit(session, 0)
    assert half.finish(session, RequestStatus.FINISHED_LENGTH_CAPPED) == (False, None)
    assert half.plan().is_empty


@pytest.mark.parametrize(("params", "is_over"), [(PRODUCE, True), (None, False)], ids=["handed over", "not"])
def test_a_cut_prompt_ends_with_its_first_token_despite_min_tokens(
    params: dict[str, Any] | None, is_over: bool, started: list[Any]
) -> None:
    """Further tokens would belong to the shorter prompt. vLLM checks max_tokens before min_tokens."""
    half = Half(WINDOW, "kv_producer", started)
    request = half.request("p", 50, params and dict(params), min_tokens=8)
    assert request.num_prompt_tokens == (49 if is_over else 50)
    request.append_output_token_ids(7)
    assert check_stop(request, max_model_len=1000) is is_over
    assert (request.status is RequestStatus.FINISHED_LENGTH_CAPPED) is is_over


def test_blocks_and_their_slot_are_released_when_all_ranks_report(started: list[Any]) -> None:
    half = Half(WINDOW, "kv_producer", started, max_leases=1)
    for name in ("p", "q"):
        request = half.request(name, 50, dict(PRODUCE))
        half.admit(request, 0)
        assert [opened.request_id for opened in half.plan().opened] == [name]
        assert half.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)[0]
        refused = half.request(f"{name}2", 50, dict(PRODUCE))
        half.admit(refused, 0)
        assert half.finish(refused, RequestStatus.FINISHED_LENGTH_CAPPED) == (False, None), "no slot is left"
        half.connector.update_connector_output(KVConnectorOutput(finished_sending={name}))


@pytest.mark.parametrize(
    "lists",
    [
        np.array([[1, 2, 3, 4]] * 2),
        [np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8])],
        [np.array([], dtype=np.int64), [5, 6, 7, 8]],
        [[], []],
        [[], [5, 6, 7, 8]],
        [],
        [None, [5, 6, 7, 8]],
        "1234",
        [[1, 2], [5, 6, 7, 8], [9]],
        [[True, 2], [5, 6, 7, 8]],
    ],
    ids=str,
)
def test_malformed_block_lists_are_refused_and_the_prompt_is_computed(lists: Any, started: list[Any]) -> None:
    """The truth value of an array is an error, so each type is checked before emptiness."""
    params = handed_over(WINDOW, 50, started) | {"remote_block_ids": lists}
    consumer = Half(WINDOW, "kv_consumer", started)
    request = consumer.request("d", 50, params)
    assert consumer.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    consumer.admit(request, 0)
    assert consumer.plan().loads == []
    stats = consumer.connector.get_kv_connector_stats()
    assert stats.reduce()["vllm:hybridkv_peer_prompts_total"] == 1


def test_an_empty_list_is_valid_for_a_group_that_sends_nothing(started: list[Any]) -> None:
    params = handed_over(CHUNKED, 97, started)
    assert params["remote_block_ids"][0] == []
    consumer = Half(CHUNKED, "kv_consumer", started)
    assert consumer.connector.get_num_new_matched_tokens(consumer.request("d", 97, params), 0) == (96, True)


def test_a_producer_with_vllms_connector_is_refused_and_the_prompt_computed(started: list[Any]) -> None:
    theirs = {
        **{key: value for key, value in handed_over(FULL, 50, started).items() if key != "hybridkv"},
        "transfer_mode": "pull",
        "pp_size": 1,
    }
    consumer = Half(FULL, "kv_consumer", started)
    assert consumer.connector.get_num_new_matched_tokens(consumer.request("d", 50, theirs), 0) == (0, False)


def test_a_second_turn_that_requests_a_read_back_is_computed(started: list[Any]) -> None:
    """vLLM's own connector reads back if `bidirectional_kv_xfer` is set."""
    back = {**handed_over(FULL, 50, started), "do_remote_prefill": False, "do_remote_decode": True}
    half = Half(FULL, "kv_both", started)
    request = half.request("p", 80, back)
    assert half.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    half.admit(request, 0)
    assert half.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)[0]


def write_adapter(path: Path, content: str) -> None:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (path / "adapter_model.safetensors").write_bytes(content.encode() * 1000)


def adapter_half(role: str, lora: LoRARequest, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> Half:
    """An engine that started an hour after the adapter's files were written, and has read them."""
    monkeypatch.setattr(adapters, "LOOK_S", SOON_S)
    half = Half(FULL, role, started)
    found = half.connector._scheduler._adapters
    found._began_ns = time.time_ns() + HOUR_NS
    found._now_ns = lambda: time.time_ns() + HOUR_NS
    half.finish(half.request("first", 60, None, lora), RequestStatus.FINISHED_STOPPED)
    assert found.wait_until_idle(SOON_S)
    return half


def admitted(half: Half, lora: LoRARequest) -> Request:
    request = half.request("p", 60, dict(PRODUCE), lora)
    half.connector.get_num_new_matched_tokens(request, 0)
    half.admit(request, 0)
    return request


def test_a_reset_that_preempts_requests_keeps_the_content_of_the_adapter(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step admits the request again before its plan is made."""
    lora = LoRARequest("sql", 1, str(tmp_path / "sql"))
    write_adapter(tmp_path / "sql", "version 1")
    producer = adapter_half("kv_producer", lora, started, monkeypatch)
    request = admitted(producer, lora)
    producer.plan()
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    producer.connector.get_num_new_matched_tokens(request, 0)
    producer.admit(request, 0)
    producer.plan(preempted={"p"})
    assert producer.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)[0]


@pytest.mark.parametrize(("consumers", "offered"), [("version 1", (59, True)), ("version 2", (0, False))])
def test_a_prompt_of_an_adapter_with_other_files_is_computed(
    consumers: str, offered: tuple[int, bool], started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both adapters have the same name and path, so the engine's block hashes are equal."""
    lora = LoRARequest("sql", 1, str(tmp_path / "sql"))
    write_adapter(tmp_path / "sql", "version 1")
    producer = adapter_half("kv_producer", lora, started, monkeypatch)
    holds, params = producer.finish(admitted(producer, lora), RequestStatus.FINISHED_LENGTH_CAPPED)
    assert holds
    write_adapter(tmp_path / "sql", consumers)
    consumer = adapter_half("kv_consumer", lora, started, monkeypatch)
    request = consumer.request("d", 60, params, lora)
    assert consumer.connector.get_num_new_matched_tokens(request, 0) == offered
    without = consumer.request("e", 60, params)
    assert consumer.connector.get_num_new_matched_tokens(without, 0) == (0, False)


def test_a_prompt_of_an_adapter_whose_files_change_is_not_handed_over(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may have loaded the adapter before or after the change."""
    lora = LoRARequest("sql", 1, str(tmp_path / "sql"))
    write_adapter(tmp_path / "sql", "version 1")
    producer = adapter_half("kv_producer", lora, started, monkeypatch)
    request = admitted(producer, lora)
    producer.plan()
    write_adapter(tmp_path / "sql", "version 2")
    assert producer.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED) == (False, None)
    assert producer.plan().dropped == ["p"]


def test_a_prompt_of_an_adapter_with_unread_files_is_neither_handed_over_nor_loaded(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = LoRARequest("sql", 1, str(tmp_path / "missing"))
    producer = adapter_half("kv_producer", lora, started, monkeypatch)
    request = admitted(producer, lora)
    assert producer.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED) == (False, None)
    consumer = adapter_half("kv_consumer", lora, started, monkeypatch)
    other = consumer.request("d", 60, handed_over(FULL, 60, started), lora)
    assert consumer.connector.get_num_new_matched_tokens(other, 0) == (0, False)
    consumer.admit(other, 0)
    assert consumer.plan().ended == ["d"]
    assert consumer.connector.get_kv_connector_stats().reduce()["vllm:hybridkv_peer_prompts_total"] == 1


def test_an_aborted_request_does_not_prove_that_the_engine_loaded_its_adapter(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request loads its adapter in place only if it runs."""
    lora = LoRARequest("sql", 1, str(tmp_path / "sql"), load_inplace=True)
    write_adapter(tmp_path / "sql", "version 1")
    producer = adapter_half("kv_producer", lora, started, monkeypatch)
    producer.connector._scheduler._adapters._began_ns = 0
    producer.finish(admitted(producer, lora), RequestStatus.FINISHED_ABORTED)
    later = LoRARequest("sql", 1, str(tmp_path / "sql"))
    assert not producer.finish(admitted(producer, later), RequestStatus.FINISHED_LENGTH_CAPPED)[0]
    assert producer.finish(admitted(producer, lora), RequestStatus.FINISHED_LENGTH_CAPPED)[0]
    assert producer.finish(admitted(producer, later), RequestStatus.FINISHED_LENGTH_CAPPED)[0]
