"""One engine resumes what the other computed, byte for byte, and nothing of it remains when both are idle.

Every byte that a forward pass would read is compared with the expected one, whoever wrote it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hybridkv.connectors.vllm import PEER_CONNECTOR, register
from hybridkv.connectors.vllm.nixl.agent.rank_read import RankRead
from hybridkv.connectors.vllm.nixl.memory.rank_memory import NixlRankMemory
from oracle.mixes import GEMMA3, LLAMA4, NAMED, QWEN3_NEXT, Mix
from oracle.pairs import CALM, Pair, require_handed_over, tokens
from oracle.runner import CorruptionError
from oracle.settings import Connector, EngineSettings

LENGTHS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 129, 200)
LONG_S = 1e6
SHORT_S = 0.2


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def settings(role: str, num_blocks: int = 4000, max_running: int = 4, **extra: Any) -> EngineSettings:
    config = {"weights_digest": "oracle", **CALM, **extra}
    return EngineSettings(
        num_blocks=num_blocks, max_running=max_running, connector=Connector(PEER_CONNECTOR, config, role=role)
    )


def a_pair(mix: Mix, **extra: Any) -> Pair:
    return Pair(mix, settings("kv_producer", **extra), settings("kv_consumer", **extra))


@pytest.mark.parametrize("mix", NAMED, ids=lambda mix: mix.name)
def test_a_prompt_of_any_length_is_handed_over(mix: Mix) -> None:
    with a_pair(mix) as pair:
        require_handed_over(pair, LENGTHS)


@pytest.mark.parametrize("mix", NAMED, ids=lambda mix: mix.name)
def test_many_requests_with_shared_prefixes_hit_in_part(mix: Mix) -> None:
    """Sixteen at a time, with beginnings that both engines have by the second turn."""
    stems = [tokens(96, seed=seed) for seed in range(3)]
    with a_pair(mix) as pair:
        for turn in range(2):
            prompts = [stems[i % 3] + tokens(20 + 7 * i, seed=100 * turn + i) for i in range(16)]
            answers = [pair.prefill(f"p{turn}-{i}", prompt) for i, prompt in enumerate(prompts)]
            for i, (prompt, params) in enumerate(zip(prompts, answers, strict=True)):
                pair.decode(f"d{turn}-{i}", prompt, 4, params)
            pair.drain()
        assert pair.consumer.failed_loads == 0
        assert pair.consumer.restored_tokens > 0


def test_a_full_local_hit_reads_nothing_and_frees_the_producer() -> None:
    prompt = tokens(97, seed=1)
    with a_pair(GEMMA3, lease_seconds=LONG_S) as pair:
        pair.decode("d0", prompt, 3, pair.prefill("p0", prompt))
        pair.drain()
        pair.consumer.restored_tokens = 0
        pair.decode("d1", prompt, 3, pair.prefill("p1", prompt))
        # Otherwise the lease would hold for days.
        pair.drain()
        assert pair.consumer.restored_tokens == 0


@pytest.mark.parametrize("steps", range(4))
def test_an_aborted_consumer_frees_both_sides_once(steps: int) -> None:
    prompt = tokens(150, seed=2)
    with a_pair(QWEN3_NEXT, lease_seconds=LONG_S) as pair:
        pair.decode("d", prompt, 3, pair.prefill("p", prompt))
        for _ in range(steps):
            pair.step()
        pair.consumer.abort("d")
        pair.drain()


@pytest.mark.parametrize("steps", range(3))
def test_an_aborted_producer_holds_nothing(steps: int) -> None:
    with a_pair(QWEN3_NEXT, lease_seconds=LONG_S) as pair:
        pair.producer.submit_with_params("p", tokens(180, seed=3), 1, {"do_remote_decode": True}, 1)
        for _ in range(steps):
            pair.step()
        pair.producer.abort("p")
        pair.drain()
        assert pair.producer.answered["p"] is None


def few_blocks(mix: Mix) -> int:
    """As few as one request of `expired` needs, so that the next one gets the blocks of the one before."""
    return mix.max_blocks(160, 64) + 8


def expired(pair: Pair) -> tuple[list[int], dict[str, Any]]:
    """A prompt with an expired lease, whose blocks hold tokens of other prompts by now."""
    prompt = tokens(150, seed=4)
    params = pair.prefill("p", prompt)
    assert params is not None
    pair.until(lambda: pair.producer.is_idle)
    pair.producer.reset_prefix_cache()
    for seed in range(3):
        pair.producer.submit_with_params(f"other{seed}", tokens(150, seed=50 + seed), 1, None)
    pair.until(lambda: pair.producer.is_idle)
    return prompt, params


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("mix", NAMED, ids=lambda mix: mix.name)
def test_content_read_after_its_lease_has_expired_is_never_used(mix: Mix, verify: bool) -> None:
    sizes = {"lease_seconds": SHORT_S, "verify": verify, "num_blocks": few_blocks(mix)}
    with Pair(mix, settings("kv_producer", **sizes), settings("kv_consumer", verify=verify)) as pair:
        prompt, params = expired(pair)
        pair.decode("d", prompt, 5, params)
        pair.drain()
        assert pair.consumer.failed_loads == 1


@pytest.mark.parametrize("mix", [GEMMA3, QWEN3_NEXT, LLAMA4], ids=lambda mix: mix.name)
def test_without_the_nonce_comparison_it_would_be_used(mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(NixlRankMemory, "has_nonce", lambda self, place, nonce: True)
    sizes = {"lease_seconds": SHORT_S, "verify": False, "num_blocks": few_blocks(mix)}
    with Pair(mix, settings("kv_producer", **sizes), settings("kv_consumer", verify=False)) as pair:
        prompt, params = expired(pair)
        pair.decode("d", prompt, 5, params)
        with pytest.raises(CorruptionError):
            pair.drain()


def mixed_up(pair: Pair, group: int) -> None:
    """Submits two prompts; the parameters of the first have blocks of the other one in one group."""
    prompts = tokens(150, seed=5), tokens(150, seed=6)
    params, others = pair.prefill("p0", prompts[0]), pair.prefill("p1", prompts[1])
    assert params is not None and others is not None
    mixed = copy.deepcopy(params)
    mixed["remote_block_ids"][group] = others["remote_block_ids"][group]
    pair.decode("d1", prompts[1], 5, others)
    pair.decode("d0", prompts[0], 5, mixed)
    pair.drain()


@pytest.mark.parametrize("group", range(len(GEMMA3.groups)))
def test_blocks_of_another_prompt_in_any_group_are_noticed(group: int) -> None:
    """The control of the byte comparison: a wrong table, which a lease cannot show."""
    with a_pair(GEMMA3, verify=False) as pair, pytest.raises(CorruptionError):
        mixed_up(pair, group)


@pytest.mark.parametrize("group", range(len(GEMMA3.groups)))
def test_blocks_outside_of_the_lease_are_not_used(group: int) -> None:
    """The producer digests the blocks of the lease, whatever list the proxy passes on."""
    with a_pair(GEMMA3) as pair:
        mixed_up(pair, group)
        assert pair.consumer.failed_loads == 1


def test_bytes_that_changed_in_transit_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(150, seed=7)
    with a_pair(GEMMA3) as pair:
        params = pair.prefill("p", prompt)
        check = RankRead.check

        def damaged(self: RankRead, timeout_s: float) -> None:
            assert self._pairing is not None
            at = self._pairing.ranges
            region, offset = int(at.local_regions[0]), int(at.local_offsets[0])
            self._tools.memory._views[region][offset] ^= 1
            check(self, timeout_s)

        monkeypatch.setattr(RankRead, "check", damaged)
        pair.decode("d", prompt, 5, params)
        pair.drain()
        assert pair.consumer.failed_loads == 1


def test_a_lost_producer_costs_one_failed_load() -> None:
    prompt = tokens(150, seed=8)
    with a_pair(QWEN3_NEXT) as pair:
        params = pair.prefill("p", prompt)
        assert pair.producer.worker_connector is not None
        pair.producer.worker_connector.shutdown()
        pair.decode("d", prompt, 5, params)
        pair.consumer.drain()
        pair.consumer.check_idle()
        assert pair.consumer.failed_loads == 1


def test_a_prompt_that_differs_from_the_producers_is_computed() -> None:
    with a_pair(GEMMA3, lease_seconds=LONG_S) as pair:
        params = pair.prefill("p", tokens(150, seed=9))
        pair.decode("d", tokens(150, seed=10), 5, params)
        pair.drain()
        assert (pair.consumer.restored_tokens, pair.consumer.failed_loads) == (0, 0)


@pytest.mark.parametrize("lost", ["hybridkv", "remote_block_ids", "remote_host", "remote_num_tokens"])
def test_incomplete_params_are_refused_and_the_prompt_is_computed(lost: str) -> None:
    prompt = tokens(150, seed=11)
    with a_pair(GEMMA3, lease_seconds=SHORT_S) as pair:
        params = pair.prefill("p", prompt)
        assert params is not None
        del params[lost]
        pair.decode("d", prompt, 5, params)
        pair.drain()
        assert (pair.consumer.restored_tokens, pair.consumer.failed_loads) == (0, 0)


def test_engines_of_different_models_refuse_each_other() -> None:
    prompt = tokens(150, seed=12)
    producer = settings("kv_producer")
    consumer = settings("kv_consumer", weights_digest="another")
    with Pair(GEMMA3, producer, consumer) as pair:
        pair.decode("d", prompt, 5, pair.prefill("p", prompt))
        pair.drain()
        assert pair.consumer.failed_loads == 1


def test_the_number_of_leases_is_limited_by_the_slots() -> None:
    with a_pair(GEMMA3, max_leases=2, lease_seconds=LONG_S) as pair:
        prompts = [tokens(40, seed=20 + i) for i in range(4)]
        answers = [pair.prefill(f"p{i}", prompt) for i, prompt in enumerate(prompts)]
        assert [params is not None for params in answers] == [True, True, False, False]
        for i, (prompt, params) in enumerate(zip(prompts, answers, strict=True)):
            pair.decode(f"d{i}", prompt, 2, params)
        pair.drain()
        assert pair.prefill("again", prompts[0]) is not None
        pair.decode("again", prompts[0], 2, pair.producer.answered["again"])
        pair.drain()


def test_preempted_consumers_recompute_their_loaded_tokens() -> None:
    # Any two fit when they begin, but no two at their end, which is so late that the second is loaded by then.
    with Pair(QWEN3_NEXT, settings("kv_producer"), settings("kv_consumer", num_blocks=44)) as pair:
        prompts = [tokens(100 + i, seed=30 + i) for i in range(6)]
        answers = [pair.prefill(f"p{i}", prompt) for i, prompt in enumerate(prompts)]
        for i, (prompt, params) in enumerate(zip(prompts, answers, strict=True)):
            pair.decode(f"d{i}", prompt, 300, params)
        pair.drain()
        assert pair.consumer.preemptions > 0
