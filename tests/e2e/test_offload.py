"""A hybrid model's prefix is restored from the tier with equal tokens, log-probabilities and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from audit import Audit, stored_views
from equality import require_close, require_same, require_same_output
from harness import Engine, Result, exact_prompt_lengths, make_prompt
from noise import Noise

from hybridkv.planner import GroupKind


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Result]:
    return [engine.generate([prompt])[0] for prompt in prompts]


def restorable(engine: Engine, prompt: Sequence[int]) -> int:
    chunk: int = engine.connector._scheduler._layout.spec.chunk_tokens
    return (len(prompt) - 1) // chunk * chunk


@pytest.fixture
def prompts(kind: str) -> list[list[int]]:
    return [make_prompt(length, seed=i) for i, length in enumerate(exact_prompt_lengths(kind, 2))]


def test_a_restored_prefix_equals_the_cold_run_and_the_engines_own_hit(
    engine: Engine, audit: Audit, prompts: list[list[int]]
) -> None:
    cold = one_by_one(engine, prompts)
    local = one_by_one(engine, prompts)
    assert audit.restored_tokens == 0
    engine.reset_prefix_cache()
    warm = one_by_one(engine, prompts)
    require_same(audit, cold, warm)
    require_same(audit, local, warm)
    assert [result.num_cached_tokens for result in cold] == [0, 0]
    assert [result.num_cached_tokens for result in warm] == [restorable(engine, prompt) for prompt in prompts]
    assert audit.restored_tokens == sum(restorable(engine, prompt) for prompt in prompts)


def test_the_views_cover_every_byte_that_the_engine_reads_once(engine: Engine, audit: Audit) -> None:
    pages = engine.worker_connector._worker._pages
    last_block = engine.kv_cache_config.num_blocks - 1
    for group_index, group in enumerate(engine.kv_cache_config.kv_cache_groups):
        for block_id in (0, 1, last_block):
            expected = [engine.page(layer, block_id) for layer in group.layer_names]
            addresses, sizes = pages[group_index].addresses([block_id])
            assert addresses.tolist() == [page.data_ptr() for page in expected]
            assert sizes.tolist() == [page.numel() for page in expected]
            ends = sorted(zip(addresses.tolist(), (addresses + sizes).tolist(), strict=True))
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_only_tokens_that_the_engine_lacks_are_restored(engine: Engine, audit: Audit, prompts: list[list[int]]) -> None:
    long = prompts[1]
    short = long[: len(prompts[0])]
    cold = one_by_one(engine, [long])
    engine.reset_prefix_cache()
    engine.generate([short])
    audit.forget()
    warm = one_by_one(engine, [long])
    require_same(audit, cold, warm)
    assert warm[0].num_cached_tokens == restorable(engine, long)
    assert audit.restored_tokens == restorable(engine, long) - restorable(engine, short)


def test_eight_requests_with_shared_prefixes_equal_the_engines_own_hits(
    engine: Engine, audit: Audit, kind: str, noise: Noise
) -> None:
    length = exact_prompt_lengths(kind, 1)[0]
    stems = [make_prompt(length // 2, seed=100 + i) for i in range(2)]
    prompts = [make_prompt(length, seed=200 + i, prefix=stems[i % 2]) for i in range(8)]
    one_by_one(engine, prompts)
    local = engine.generate(prompts)
    engine.reset_prefix_cache()
    warm = engine.generate(prompts)
    assert [result.num_cached_tokens for result in warm] == [result.num_cached_tokens for result in local]
    assert audit.restored_tokens >= restorable(engine, prompts[0])
    # Asynchronous loads end in different steps, so the batches differ.
    require_close(audit, local, warm, noise)


def test_an_answer_is_part_of_the_next_prompts_prefix(engine: Engine, audit: Audit, kind: str) -> None:
    """One turn of a conversation: the prompt is the last prompt, its answer and more tokens.

    Steps of an answer round differently than steps of a prompt. An engine whose last state is that of the first prompt
    computes everything after it again, but its next hit, like ours, covers blocks of the answer.
    """
    first = make_prompt(exact_prompt_lengths(kind, 1)[0], seed=300)
    answer = engine.generate([first], max_tokens=200)[0]
    second = [*first, *answer.token_ids, *make_prompt(30, seed=301)]
    engine.generate([second])
    expected = engine.generate([second])
    engine.reset_prefix_cache()
    warm = engine.generate([second])
    require_same(audit, expected, warm)
    assert warm[0].num_cached_tokens > len(first) + len(answer.token_ids) // 2


def test_a_group_with_zeroed_pages_is_detected(engine: Engine, audit: Audit, prompts: list[list[int]]) -> None:
    prompts = prompts[1:]
    for group_index in engine.connector._scheduler._layout.spec.stored_groups:
        engine.connector.reset_cache()
        engine.reset_prefix_cache()
        audit.stored.clear()
        cold = one_by_one(engine, prompts)
        engine.reset_prefix_cache()
        for key in audit.keys_of(group_index):
            for view in stored_views(engine, key):
                view[:] = bytes(len(view))
        audit.forget()
        warm = one_by_one(engine, prompts)
        assert audit.restored_tokens > 0
        with pytest.raises(AssertionError):
            require_same(audit, cold, warm)
        assert any(f"group {group_index} " in mismatch for mismatch in audit.mismatches)
        assert not all(a.same_output(b) for a, b in zip(cold, warm, strict=True)), (
            f"group {group_index} was zeroed and log-probabilities stayed equal: they prove nothing"
        )


def test_a_recurrent_state_of_another_boundary_is_detected(
    engine: Engine, audit: Audit, prompts: list[list[int]]
) -> None:
    groups = engine.connector._scheduler._layout.spec.groups
    recurrent = [i for i, group in enumerate(groups) if group.kind is GroupKind.RECURRENT]
    if not recurrent:
        pytest.skip("this model has no recurrent group")
    cold = one_by_one(engine, prompts)
    engine.reset_prefix_cache()
    for group_index in recurrent:
        first, *_, last = audit.keys_of(group_index)
        other = [bytes(view) for view in stored_views(engine, first)]
        for view, part in zip(stored_views(engine, last), other, strict=True):
            view[:] = part
    warm = one_by_one(engine, prompts)
    assert audit.restored_tokens > 0
    with pytest.raises(AssertionError):
        require_same(audit, cold, warm)
    assert not cold[-1].same_output(warm[-1])


def test_a_flipped_bit_is_recomputed_and_never_used(engine: Engine, audit: Audit, prompts: list[list[int]]) -> None:
    cold = one_by_one(engine, prompts)
    engine.reset_prefix_cache()
    arena = engine.worker_connector._worker._arena
    index = engine.connector._scheduler._stack.primary
    for group_index in engine.connector._scheduler._layout.spec.stored_groups:
        key = audit.keys_of(group_index)[-1]
        slot = index.pin(key)
        arena.views(slot)[-1][-1] ^= 1
        index.unpin(key)
    warm = one_by_one(engine, prompts)
    assert audit.failed_loads > 0
    assert audit.mismatches == []
    require_same_output(cold, warm)


def test_an_abort_during_a_load_leaks_nothing(engine: Engine, audit: Audit, prompts: list[list[int]]) -> None:
    cold = one_by_one(engine, prompts)
    engine.reset_prefix_cache()
    for steps in range(3):
        request_id = engine.add(prompts[0], request_id=f"aborted-{steps}")
        for _ in range(steps):
            engine.step()
        engine.abort(request_id)
        engine.drain()
    engine.reset_prefix_cache()
    audit.forget()
    require_same(audit, cold, one_by_one(engine, prompts))


def test_a_connector_reset_clears_the_tier(engine: Engine, audit: Audit, prompts: list[list[int]]) -> None:
    cold = one_by_one(engine, prompts)
    assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    again = one_by_one(engine, prompts)
    assert audit.restored_tokens == 0
    assert [result.num_cached_tokens for result in again] == [0, 0]
    require_same_output(cold, again)
