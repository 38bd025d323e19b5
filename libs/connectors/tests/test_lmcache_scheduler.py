"""Scheduler half of HybridLMCacheConnector with a server that answers late or never."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_played import BLOCK, CHUNK, DRAFTER, FULL, STATE, TIMEOUT_S, WINDOW, FakeEngine, new_request

from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.messages import LoadFailure, StoreOutcome
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK
from hybridkv.connectors.vllm.common.role import Role
from hybridkv.connectors.vllm.lmcache import load_tracker
from hybridkv.connectors.vllm.lmcache.load_tracker import SUSPECT_S
from hybridkv.hashing import ChunkKeys
from hybridkv.lmcache.calls import CallFailureReason
from hybridkv.planner.stages import MAX_FAILED_LOADS

PROMPT = tuple(range(100, 100 + 3 * CHUNK + BLOCK + 1))
"""Three chunks, a block, and a token."""
NOTHING: Any = SimpleNamespace(blocks=())


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def load(engine: FakeEngine, request: Any, num_chunks: int = 3) -> Any:
    """Track a request, answer its lookup, and start its load. Returns the load."""
    engine.half.track(request)
    engine.server.answer(num_chunks)
    offered = engine.half.matched_tokens(request, 0)
    assert offered == num_chunks * CHUNK
    engine.half.on_allocated(request, engine.new_blocks(request, offered), offered)
    (planned,) = engine.step().loads
    return planned


def finish(engine: FakeEngine, *requests: Any) -> None:
    """Finish the requests and free their blocks."""
    for request in requests:
        request.status = request.status.FINISHED_ABORTED
        engine.free(request)
    engine.step(finished=[request.request_id for request in requests])


def is_clean(engine: FakeEngine) -> bool:
    """True if no request, load or lock is left."""
    tracker = engine.load_tracker
    return not (tracker._requests or tracker._loads or engine.server.locked or engine.half.has_work_in_flight())


def test_a_request_waits_for_the_answer_and_loads_the_found_chunks(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    assert engine.server.num_lookups == 1
    assert engine.half.matched_tokens(request, BLOCK) is None
    engine.server.answer(2)
    assert engine.half.matched_tokens(request, BLOCK) == engine.half.matched_tokens(request, BLOCK) == 2 * CHUNK - BLOCK
    engine.half.on_allocated(request, engine.new_blocks(request, 2 * CHUNK), 2 * CHUNK - BLOCK)
    (planned,) = engine.step().loads
    assert planned.refused is None and planned.start_chunk == 0 and len(planned.digests) == 2
    blocks = [block.block_id for block in engine.tables["r"][0]]
    assert [(copy.chunk, copy.first_block, list(copy.block_ids)) for copy in planned.copies] == [
        (0, 1, blocks[1:2]),
        (1, 0, blocks[2:]),
    ]
    assert engine.server.locked and engine.half.has_work_in_flight()
    engine.tell(loaded=["r"])
    assert not engine.server.locked
    assert engine.server.num_lookups == 1
    finish(engine, request)
    assert is_clean(engine)


@pytest.mark.parametrize("reason", [CallFailureReason.LOST, CallFailureReason.TIMEOUT, CallFailureReason.UNSENT, None])
def test_a_server_without_a_hit_costs_a_request_nothing(engine: FakeEngine, reason: CallFailureReason | None) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    if reason is None:
        engine.server.answer(0)
    else:
        engine.server.fail(reason)
    assert engine.half.matched_tokens(request, 0) == 0
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    (store,) = engine.step({"r": len(PROMPT)}).stores
    assert (store.start_chunk, len(store.digests)) == (0, 3)


def test_a_late_answer_locks_nothing(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    assert engine.half.matched_tokens(request, 0) is None
    engine.now_s = TIMEOUT_S
    assert engine.half.matched_tokens(request, 0) == 0
    engine.server.answer(3)
    assert not engine.server.locked
    assert engine.half.matched_tokens(request, 0) == 0


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_request_that_ends_before_its_allocation_locks_nothing(engine: FakeEngine, is_answered: bool) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    if is_answered:
        engine.server.answer(3)
    finish(engine, request)
    if not is_answered:
        assert not is_clean(engine) or engine.server.asked
        engine.server.answer(3)
    assert is_clean(engine)


def test_a_lookup_that_raises_is_a_miss(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no such chunk")

    monkeypatch.setattr(engine.server, "lookup", broken)
    request = new_request("r", PROMPT)
    engine.half.track(request)
    assert engine.half.matched_tokens(request, 0) == 0


def test_a_load_that_was_never_offered_fails_alone(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    engine.server.answer(0)
    assert engine.half.matched_tokens(request, 0) == 0
    engine.half.on_allocated(request, engine.new_blocks(request, CHUNK), CHUNK)
    (planned,) = engine.step().loads
    assert planned.refused is not None and planned.request_id == "r"
    engine.tell(failures={"r": [LoadFailure("io", planned.refused)]})
    finish(engine, request)
    assert is_clean(engine)


def test_a_load_with_another_boundary_than_offered_fails_alone(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    engine.server.answer(3)
    assert engine.half.matched_tokens(request, 0) == 3 * CHUNK
    engine.half.on_allocated(request, engine.new_blocks(request, 2 * CHUNK), 2 * CHUNK)
    (planned,) = engine.step().loads
    assert planned.refused is not None and not planned.copies
    engine.tell(failures={"r": [LoadFailure("io", planned.refused)]})
    assert not engine.server.locked
    assert engine.half.matched_tokens(request, 0) is None, "it steps back once"
    assert engine.half.matched_tokens(request, 0) == 0


# Locks of a request are released as soon as it runs, even if another connector loaded it.


@pytest.mark.parametrize("kv_role", [Role(stores=False), Role()], ids=["loads", "both"])
@pytest.mark.parametrize("answers_first", [False, True])
@pytest.mark.parametrize("skips_prefix_cache", [False, True])
def test_a_running_request_keeps_no_lock(kv_role: Role, answers_first: bool, skips_prefix_cache: bool) -> None:
    engine = FakeEngine(kv_role=kv_role)
    request = new_request("r", PROMPT, **({"prompt_logprobs": 1} if skips_prefix_cache else {}))
    assert request.skip_reading_prefix_cache is skips_prefix_cache
    engine.half.track(request)
    if answers_first:
        engine.server.answer(3)
    # The engine has all loadable tokens already.
    assert engine.half.matched_tokens(request, 3 * CHUNK) == 0
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    if not answers_first:
        engine.server.answer(3)
    assert not engine.server.locked
    plan = engine.step({"r": len(PROMPT)})
    assert not plan.stores, "the server has all chunks"
    finish(engine, request)
    assert is_clean(engine)


@pytest.mark.parametrize(("kv_role", "params"), [(Role(loads=False), {}), (Role(), {"prompt_logprobs": 1})])
def test_a_request_without_loads_locks_nothing_while_it_waits(kv_role: Role, params: Any) -> None:
    engine = FakeEngine(kv_role=kv_role)
    request = new_request("r", PROMPT, **params)
    engine.half.track(request)
    engine.server.answer(2)
    assert not engine.server.locked
    assert engine.half.matched_tokens(request, 0) == 0
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    (store,) = engine.step({"r": len(PROMPT)}).stores
    assert (store.start_chunk, len(store.digests)) == (2, 3)


@pytest.mark.parametrize("computed_tokens", [0, BLOCK])
def test_blocks_that_another_connector_loads_lose_their_marks(engine: FakeEngine, computed_tokens: int) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    blocks = engine.new_blocks(request, 2 * BLOCK)
    marked = blocks.blocks[0][1].block_id
    engine.half._engine_corruption._add(marked)
    request.num_computed_tokens = computed_tokens
    engine.half.on_allocated(request, blocks, 0)
    assert engine.half._engine_corruption.is_corrupt(marked) is (computed_tokens > 0)


def test_a_prefix_loaded_by_another_connector_is_not_kept_locked(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    engine.server.answer(2)
    assert engine.half.matched_tokens(request, 0) == 2 * CHUNK
    engine.half.on_allocated(request, NOTHING, 0)
    assert not engine.server.locked
    engine.new_blocks(request, len(PROMPT))
    (store,) = engine.step({"r": len(PROMPT)}).stores
    assert (store.start_chunk, len(store.digests)) == (2, 3)


def test_close_releases_all_locks_now_or_when_they_are_taken(engine: FakeEngine) -> None:
    requests = [new_request(name, PROMPT) for name in "abc"]
    load(engine, requests[0])
    for request in requests[1:]:
        engine.half.track(request)
    engine.server.answer(3)
    assert len(engine.server.locked) == 2
    engine.half.close()
    assert not engine.server.locked and engine.closed == 1
    engine.server.answer(3)
    assert not engine.server.locked


@pytest.mark.parametrize("answers_first", [False, True])
def test_a_prefix_released_for_another_connector_is_looked_up_again(engine: FakeEngine, answers_first: bool) -> None:
    """The engine looks a request up again without a preemption if the load of the other connector has failed."""
    request = new_request("r", PROMPT)
    engine.half.track(request)
    if answers_first:
        engine.server.answer(3)
        assert engine.half.matched_tokens(request, 0) == 3 * CHUNK
    else:
        assert engine.half.matched_tokens(request, 0) is None
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    engine.step()
    engine.free(request)
    if not answers_first:
        assert engine.half.matched_tokens(request, 0) is None
        engine.server.answer(3)
    assert not engine.server.locked
    assert engine.half.matched_tokens(request, 0) is None, "nothing is offered without locks"
    load(engine, request)
    assert engine.server.num_lookups == 2
    engine.tell(failures={"r": [LoadFailure("io", "")]})
    assert [engine.half.matched_tokens(request, 0) for _ in range(3)] == [None, 0, 0]
    finish(engine, request)
    assert is_clean(engine)


def test_a_load_starts_inside_the_chunk_where_the_engine_ends(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    engine.server.answer(3)
    computed = CHUNK + BLOCK
    offered = engine.half.matched_tokens(request, computed)
    assert offered == 2 * CHUNK - BLOCK
    engine.half.on_allocated(request, engine.new_blocks(request, 3 * CHUNK), offered)
    (planned,) = engine.step().loads
    assert (planned.start_chunk, len(planned.digests)) == (1, 3)
    assert [(copy.chunk, copy.first_block) for copy in planned.copies] == [(1, 1), (2, 0)]


def test_a_lookup_asks_for_at_most_max_chunks() -> None:
    engine = FakeEngine(max_chunks=2)
    engine.half.track(new_request("r", PROMPT))
    assert [asked.num_chunks for asked in engine.server.asked] == [2]


@pytest.mark.parametrize("how", ["fails", "ends", "runs"])
def test_a_load_waits_for_room_and_keeps_its_found_prefix(how: str) -> None:
    engine = FakeEngine(pool_blocks=16)
    first, second = new_request("first", PROMPT), new_request("second", PROMPT)
    planned = load(engine, first)
    engine.half.track(second)
    engine.server.answer(3)
    assert engine.half.matched_tokens(second, 0) is None
    if how == "fails":
        engine.free(first)
        engine.tell(failures={"first": [LoadFailure("timeout", "")]})
        assert engine.half.matched_tokens(second, 0) is None, "the engine reserves blocks for the first"
    else:
        engine.tell(loaded=["first"])
        assert engine.half.matched_tokens(second, 0) is None, "the first keeps its blocks until it runs"
        assert planned.request_id == "first"
        if how == "ends":
            finish(engine, first)
        else:
            first.num_computed_tokens = 3 * CHUNK
            engine.step({"first": 1})
        assert engine.half.matched_tokens(second, 0) == 3 * CHUNK
    assert len(engine.server.locked) == 1


# Tokens that change, and request IDs that are reused.


def test_a_new_request_inherits_nothing_from_one_with_its_id(engine: FakeEngine) -> None:
    old = new_request("r", PROMPT)
    planned = load(engine, old)
    engine.tell(failures={"r": [LoadFailure("checksum", "bad", planned.digests[1])]})
    old.status = old.status.FINISHED_ABORTED
    new = new_request("r", tuple(reversed(PROMPT)))
    engine.half.track(new)
    engine.step(finished=["r"])
    assert engine.half.matched_tokens(new, 0) is None
    assert engine.server.asked[-1].num_chunks == 3
    assert engine.server.num_lookups == 2, "the end of the old request does not end the new one"
    engine.server.answer(3, which=-1)
    assert engine.half.matched_tokens(new, 0) == 3 * CHUNK


def test_withdrawn_tokens_are_not_loaded(engine: FakeEngine) -> None:
    """Nor the last remaining token: it is computed, after the tokens before it."""
    request = new_request("r", PROMPT[: 3 * CHUNK + 1])
    engine.half.track(request)
    engine.server.answer(3)
    request._all_token_ids.pop()
    assert request.num_tokens == 3 * CHUNK
    assert engine.half.matched_tokens(request, 0) == 0
    assert not engine.server.locked


@pytest.mark.parametrize("is_known", [False, True])
def test_a_prefix_found_under_another_adapter_is_released(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    request = new_request("r", PROMPT)
    tracked = engine.half.track(request)
    engine.server.answer(3)
    other = ChunkKeys(engine.layout.fingerprint({"model": "m"}), BLOCK, b"another adapter")

    def identify(tracked: Any) -> bool:
        tracked.request_keys = RequestKeys(engine.layout.spec, other) if is_known else None
        return is_known

    monkeypatch.setattr(engine.half._requests, "identify", identify)
    assert engine.half.matched_tokens(request, 0) == (None if is_known else 0)
    assert not engine.server.locked
    assert engine.server.num_lookups == 1 + is_known
    assert tracked is engine.half.track(request)


def test_changed_tokens_are_looked_up_again(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    engine.server.answer(3)
    other = new_request("other", tuple(reversed(PROMPT)))
    request._all_token_ids[:] = other._all_token_ids
    request.block_hashes[:] = other.block_hashes
    assert engine.half.matched_tokens(request, 0) is None
    assert not engine.server.locked and engine.server.num_lookups == 2
    engine.server.answer(2)
    assert engine.half.matched_tokens(request, 0) == 2 * CHUNK


# Failures.


def test_a_failed_load_is_retried_once_up_to_the_bad_chunk(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    planned = load(engine, request)
    engine.free(request)
    bad = [LoadFailure("checksum", "bad", planned.digests[chunk]) for chunk in (2, 1)]
    engine.tell(failures={"r": bad})
    assert engine.half.matched_tokens(request, 0) is None, "it steps back"
    assert engine.half.matched_tokens(request, 0) is None, "it is looked up again"
    assert engine.server.asked[0].num_chunks == 1
    engine.server.answer(1)
    assert engine.half.matched_tokens(request, 0) == CHUNK


def test_a_prefix_with_a_failed_load_is_offered_to_no_request_for_a_while(engine: FakeEngine) -> None:
    """With `kv_load_failure_policy: fail` each offer of it could end one more request."""
    waiting, first = new_request("waiting", PROMPT), new_request("first", PROMPT)
    engine.half.track(waiting)
    engine.server.answer(3)
    planned = load(engine, first)
    engine.free(first)
    engine.tell(failures={"first": [LoadFailure("checksum", "bad", planned.digests[2])]})
    first.status = first.status.FINISHED_ERROR
    engine.step(finished=["first"])
    num_lookups = engine.server.num_lookups
    assert engine.half.matched_tokens(waiting, 0) == 0, "although it was found before"
    late = new_request("late", (*PROMPT, *PROMPT))
    assert engine.half.matched_tokens(late, 0) == 0
    assert engine.server.num_lookups == num_lookups and not engine.server.locked
    other = new_request("other", tuple(reversed(PROMPT)))
    engine.half.track(other)
    engine.server.answer(3)
    assert engine.half.matched_tokens(other, 0) == 3 * CHUNK
    engine.now_s += SUSPECT_S
    again = new_request("again", PROMPT)
    engine.half.track(again)
    engine.server.answer(3)
    assert engine.half.matched_tokens(again, 0) is not None


def test_max_suspects_is_not_exceeded(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_tracker, "MAX_SUSPECTS", 2)
    planned = load(engine, new_request("r", PROMPT))
    engine.tell(failures={"r": [LoadFailure("checksum", "bad", planned.digests[0])]})
    assert list(engine.load_tracker._suspects) == list(planned.digests[:2])


def test_a_request_with_repeated_failed_loads_is_computed(engine: FakeEngine) -> None:
    request = new_request("r", (*PROMPT, *PROMPT))
    planned = load(engine, request, 7)
    for number in range(MAX_FAILED_LOADS):
        engine.free(request)
        engine.tell(failures={"r": [LoadFailure("checksum", "bad", planned.digests[-1])]})
        assert engine.half.matched_tokens(request, 0) is None
        if number == MAX_FAILED_LOADS - 1:
            assert engine.half.matched_tokens(request, 0) == 0
            return
        engine.half.matched_tokens(request, 0)
        engine.server.answer(7)
        offered = engine.half.matched_tokens(request, 0)
        assert offered == (6 - number) * CHUNK
        engine.half.on_allocated(request, engine.new_blocks(request, offered), offered)
        (planned,) = engine.step().loads


@pytest.mark.parametrize("reason", ["timeout", "busy"])
def test_a_load_that_failed_without_a_bad_chunk_is_not_retried(engine: FakeEngine, reason: str) -> None:
    request = new_request("r", PROMPT)
    load(engine, request)
    engine.free(request)
    engine.tell(failures={"r": [LoadFailure(reason, "")]})
    assert engine.half.matched_tokens(request, 0) is None
    assert engine.half.matched_tokens(request, 0) == 0
    assert not engine.server.locked and not engine.half.has_work_in_flight()
    # All chunks are stored again, because the server's copy may be bad.
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    (store,) = engine.step({"r": len(PROMPT)}).stores
    assert (store.start_chunk, len(store.digests)) == (0, 3)


def test_the_load_of_a_finished_request_is_followed_to_its_end(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    load(engine, request)
    request.status = request.status.FINISHED_ABORTED
    engine.step(finished=["r"])
    assert engine.server.locked and engine.half.has_work_in_flight()
    engine.tell(loaded=["r"])
    engine.free(request)
    assert is_clean(engine)


def test_a_preempted_request_is_looked_up_again(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    load(engine, request)
    engine.tell(loaded=["r"])
    request.num_preemptions += 1
    engine.step(preempted=["r"])
    assert engine.half.matched_tokens(request, 0) is None
    engine.server.answer(3)
    assert engine.half.matched_tokens(request, 0) == 3 * CHUNK


def test_a_lookup_after_a_preemption_between_two_steps_survives_the_next_step(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    load(engine, request)
    engine.tell(loaded=["r"])
    request.num_preemptions += 1
    assert engine.half.matched_tokens(request, 0) is None
    engine.server.answer(3)
    engine.step(preempted=["r"])
    assert engine.half.matched_tokens(request, 0) == 3 * CHUNK


def test_nothing_is_stored_for_a_preempted_request() -> None:
    """Its blocks belong to other requests by now, even if the engine handed over a state."""
    engine = FakeEngine((FULL, STATE))
    request = new_request("r", PROMPT)
    engine.half.track(request)
    engine.server.answer(0)
    assert engine.half.matched_tokens(request, 0) == 0
    engine.half.on_allocated(request, engine.new_blocks(request, CHUNK), 0)
    states = {"r": engine.states(request, CHUNK)}
    request.num_preemptions += 1
    assert not engine.step(preempted=["r"], states=states).stores
    engine.half.matched_tokens(request, 0)
    assert engine.step({"r": CHUNK}, states=states).stores


def test_a_reset_drops_found_prefixes_and_changes_the_keys(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    before = engine.server.asked[0].prefix
    engine.server.answer(3)
    assert engine.half.reset()
    assert not engine.server.locked
    assert engine.half.matched_tokens(request, 0) is None
    assert engine.server.asked[0].prefix != before


# Stores.


def test_each_chunk_is_stored_once_with_blocks_pinned_until_all_ranks_copied() -> None:
    engine = FakeEngine(world_size=2)
    request = new_request("r", PROMPT)
    engine.half.track(request)
    engine.server.answer(1)
    engine.half.matched_tokens(request, CHUNK)
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    request.num_computed_tokens = CHUNK
    (first,) = engine.step({"r": CHUNK}).stores
    assert (first.start_chunk, len(first.digests)) == (1, 2)
    request.num_computed_tokens = 2 * CHUNK
    (second,) = engine.step({"r": len(PROMPT) - 2 * CHUNK}).stores
    assert (second.start_chunk, len(second.digests)) == (2, 3)
    finish(engine, request)
    assert engine.num_pinned == 4 and engine.half.holds_freed_blocks()
    engine.tell({first.store_id: StoreOutcome(1), second.store_id: StoreOutcome(2)})
    assert engine.num_pinned == 2 and engine.half.has_work_in_flight()
    engine.tell({first.store_id: StoreOutcome(1)})
    assert engine.num_pinned == 0 and is_clean(engine)


def test_chunks_are_stored_once_a_server_is_connected(engine: FakeEngine) -> None:
    """Without a server its objects are unknown, so no chunk is stored yet, and none is skipped for good."""
    engine.separate = None
    request = new_request("r", PROMPT)
    engine.half.track(request)
    engine.server.fail(CallFailureReason.UNSENT)
    assert engine.half.matched_tokens(request, 0) == 0
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    assert not engine.step({"r": 2 * CHUNK}).stores
    engine.separate = False
    request.num_computed_tokens = 2 * CHUNK
    (store,) = engine.step({"r": CHUNK}).stores
    assert (store.start_chunk, len(store.digests)) == (0, 3)


def test_a_failed_store_ends_the_stores_of_its_request(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT)
    engine.half.track(request)
    engine.server.answer(0)
    engine.half.matched_tokens(request, 0)
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    (store,) = engine.step({"r": CHUNK}).stores
    engine.tell({store.store_id: StoreOutcome(1, "no server", "io")})
    request.num_computed_tokens = CHUNK
    assert not engine.step({"r": CHUNK}).stores


def test_tokens_that_are_not_final_are_not_stored(engine: FakeEngine) -> None:
    request = new_request("r", PROMPT[: CHUNK + 1])
    engine.half.track(request)
    engine.server.answer(0)
    engine.half.matched_tokens(request, 0)
    engine.half.on_allocated(request, engine.new_blocks(request, 3 * CHUNK), 0)
    # An asynchronous scheduler is ahead of the tokens, or they include drafts.
    (store,) = engine.step({"r": 2 * CHUNK}).stores
    assert len(store.digests) == 1


def test_attention_is_stored_only_after_the_answer_of_the_server() -> None:
    engine = FakeEngine((FULL, STATE))
    request = new_request("r", PROMPT)
    assert engine.half.matched_tokens(request, 3 * CHUNK) == 0
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    states = {"r": [(1, engine.tables["r"][1][-1].block_id, 3 * CHUNK)]}
    (store,) = engine.step({"r": len(PROMPT)}, states=states).stores
    assert [copy.group_index for copy in store.copies] == [1], "a state is handed over only once"
    engine.server.answer(1)
    request.num_computed_tokens = len(PROMPT) - 1
    (store,) = engine.step({"r": 1}).stores
    assert (store.start_chunk, {copy.group_index for copy in store.copies}) == (1, {0})
    assert not engine.server.locked


@pytest.mark.parametrize(("num_found", "num_stored"), [(3, 0), (2, 1)])
def test_a_state_that_the_server_has_is_not_stored_again(num_found: int, num_stored: int) -> None:
    engine = FakeEngine((FULL, STATE))
    request = new_request("r", PROMPT)
    engine.half.track(request)
    engine.server.answer(num_found)
    assert engine.half.matched_tokens(request, 3 * CHUNK) == 0
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    states = {"r": [(1, engine.tables["r"][1][-1].block_id, 3 * CHUNK)]}
    assert len(engine.step({"r": len(PROMPT)}, states=states).stores) == num_stored


@pytest.mark.parametrize("groups", [(FULL, DRAFTER), (DRAFTER, FULL), (WINDOW, DRAFTER), (STATE, FULL, DRAFTER)])
def test_the_key_of_a_drafter_part_includes_the_tokens_it_depends_on(groups: Any) -> None:
    """Two prompts that diverge right after a chunk share its attention part, but not its drafter part."""
    engine = FakeEngine(groups)
    one = new_request("one", PROMPT[: 2 * CHUNK + BLOCK + 1])
    other = new_request("other", (*PROMPT[: 2 * CHUNK], 7, *PROMPT[2 * CHUNK :])[: 2 * CHUNK + BLOCK + 1])
    same = new_request("same", (*PROMPT[: 2 * CHUNK + BLOCK], 7))
    for request in (one, other, same):
        engine.half.track(request)
    words = [asked.prefix.words for asked in engine.server.asked]
    assert [len(each) for each in words] == [4 * CHUNK * 2] * 3
    assert words[0] == words[2] != words[1]
    assert words[0][: 4 * CHUNK] == words[1][: 4 * CHUNK]


def test_a_state_has_a_key_once_the_tokens_after_it_are_known() -> None:
    engine = FakeEngine((STATE, FULL, DRAFTER))
    request = new_request("r", PROMPT[: 2 * CHUNK + BLOCK - 1])
    assert engine.half.matched_tokens(request, 0) is None
    engine.server.answer(0)
    assert engine.half.matched_tokens(request, 0) == 0
    engine.half.on_allocated(request, engine.new_blocks(request, request.num_tokens), 0)
    (block,) = [block for block in engine.tables["r"][0] if not block.is_null]
    states = {"r": [(0, block.block_id, CHUNK), (0, block.block_id, 2 * CHUNK)]}
    (store,) = engine.step({"r": request.num_tokens}, states=states).stores
    assert len(store.digests) == 1
    assert {copy.group_index for copy in store.copies} == {0, 1, 2}


def adapter_version(engine: FakeEngine, name: str, version: Any) -> Any:
    """Request with an adapter of known content."""
    request = new_request(name, PROMPT)
    tracked = engine.half.track(request)
    tracked.adapter_version = version
    engine.server.answer(0)
    assert engine.half._load_tracker.matched_tokens(tracked, 0) == 0
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    return request


def test_an_engine_that_only_loads_remembers_no_session() -> None:
    engine = FakeEngine((STATE, FULL), kv_role=Role(stores=False, loads=True))
    request = new_request("r", PROMPT)
    request.resumable = True
    engine.half.track(request)
    assert not engine.half._engine_corruption._sessions


@pytest.mark.parametrize(("version", "chunks"), [(None, [0, 1, 2]), ("oath", [2])])
def test_a_held_store_has_as_many_states_as_one_call_stores(
    monkeypatch: pytest.MonkeyPatch, version: str | None, chunks: list[int]
) -> None:
    """A held store keeps all its pages, so with more states than pages it would wait for itself."""
    engine = FakeEngine((STATE, FULL), max_chunks=2)
    monkeypatch.setattr(engine.adapters, "is_still_valid", lambda version: True)
    request = adapter_version(engine, "r", version)
    (block,) = [block for block in engine.tables["r"][0] if not block.is_null]
    states = {"r": [(0, block.block_id, number * CHUNK) for number in (1, 2, 3)]}
    (store,) = engine.step({"r": len(PROMPT)}, states=states).stores
    assert [copy.chunk for copy in store.copies if copy.group_index == 0] == chunks
    engine.tell({store.store_id: StoreOutcome(1)})
    finish(engine, request)


@pytest.mark.parametrize("holds", [False, True])
def test_stores_with_an_adapter_are_held_until_one_check_of_its_files(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    looks: list[Any] = []

    def look(version: Any) -> bool:
        looks.append(version)
        return holds

    monkeypatch.setattr(engine.adapters, "is_still_valid", look)
    requests = [adapter_version(engine, name, "oath") for name in "abc"]
    stores = engine.step(dict.fromkeys("abc", len(PROMPT))).stores
    assert [store.is_held for store in stores] == [True] * 3
    assert not engine.step().releases
    outcomes = {store.store_id: StoreOutcome(1) for store in stores}
    outcomes[stores[2].store_id] = StoreOutcome(1, "no room", "busy")
    engine.tell(outcomes)
    assert looks == ["oath"]
    assert engine.half.has_work_in_flight(), "the next plan must reach the ranks"
    releases = engine.step().releases
    assert [(release.store_id, release.is_good) for release in releases] == [
        (stores[0].store_id, holds),
        (stores[1].store_id, holds),
        (stores[2].store_id, False),
    ]
    finish(engine, *requests)
    assert is_clean(engine)


def admit_with_a_chunk(engine: FakeEngine, request: Any) -> None:
    """The engine admits a request. Another connector loads its first chunk, or the engine has it."""
    engine.half.track(request)
    engine.server.answer(0)
    engine.half.matched_tokens(request, 0)
    engine.half.on_allocated(request, engine.new_blocks(request, len(PROMPT)), 0)
    request.num_computed_tokens = CHUNK


def test_stores_of_a_request_whose_load_within_the_step_fails_are_dropped(engine: FakeEngine) -> None:
    """Another connector loads. The server must not get the bytes before the step reports whether the load failed."""
    requests = {
        name: new_request(name, tuple(range(base, base + len(PROMPT)))) for base, name in ((0, "bad"), (500, "good"))
    }
    for request in requests.values():
        admit_with_a_chunk(engine, request)
    num_new = len(PROMPT) - CHUNK
    bad, good = engine.step(dict.fromkeys(requests, num_new), synchronous=dict.fromkeys(requests, CHUNK)).stores
    assert bad.is_held and good.is_held
    engine.tell({bad.store_id: StoreOutcome(1)}, invalid_block_ids=[engine.tables["bad"][0][1].block_id])
    engine.tell({good.store_id: StoreOutcome(1)})
    releases = {each.store_id: each.is_good for each in engine.step().releases}
    assert releases == {bad.store_id: False, good.store_id: True}
    finish(engine, *requests.values())
    assert is_clean(engine)


def test_stores_are_held_only_while_a_load_within_the_step_may_still_fail(engine: FakeEngine) -> None:
    requests = {
        name: new_request(name, tuple(range(base, base + len(PROMPT))))
        for base, name in ((0, "loads"), (500, "next"), (900, "later"))
    }
    for request in requests.values():
        admit_with_a_chunk(engine, request)
    (held,) = engine.step({"loads": CHUNK}, synchronous={"loads": CHUNK}).stores
    # With asynchronous scheduling, this step is planned before the report. The request may use the loaded blocks.
    (also_held,) = engine.step({"next": CHUNK}, admitted={"next": CHUNK}).stores
    assert held.is_held and also_held.is_held
    engine.tell({held.store_id: StoreOutcome(1), also_held.store_id: StoreOutcome(1)})
    requests["loads"].num_computed_tokens = 2 * CHUNK
    num_new = len(PROMPT) - CHUNK
    free = engine.step({"loads": num_new - CHUNK, "later": num_new}, admitted={"later": CHUNK}).stores
    assert len(free) == 2 and not any(store.is_held for store in free)
    for store in free:
        engine.tell({store.store_id: StoreOutcome(1)})
    # Another request fails to load a block that was in the request's table at its start.
    reused = engine.tables["loads"][0][0].block_id
    engine.tell(invalid_block_ids=[reused])
    tracked = engine.half._requests.get("loads")
    assert tracked is not None and tracked.is_storable and tracked.step_load is None
    finish(engine, *requests.values())
    assert is_clean(engine)


def test_reports_of_blocks_that_are_in_no_table_are_ignored(engine: FakeEngine) -> None:
    """The null block stands in the tables of many requests. The engine asserts that a block exists."""
    request = new_request("good", PROMPT)
    admit_with_a_chunk(engine, request)
    engine.tables["good"][0][0] = engine.pool.null_block
    (store,) = engine.step({"good": CHUNK}, synchronous={"good": CHUNK}).stores
    engine.tell({store.store_id: StoreOutcome(1)}, invalid_block_ids=[NULL_BLOCK, len(engine.pool.blocks), -1])
    (release,) = engine.step().releases
    assert release.is_good


@pytest.mark.parametrize("is_load", [True, False], ids=["load", "store"])
def test_a_request_that_starts_over_before_a_failure_is_reported_stores_again(
    engine: FakeEngine, is_load: bool
) -> None:
    request = new_request("bad", PROMPT)
    admit_with_a_chunk(engine, request)
    (store,) = engine.step({"bad": CHUNK}, synchronous={"bad": CHUNK}).stores
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    engine.step(preempted=["bad"])  # planned while the step of the load and store is in flight
    if is_load:
        engine.tell({store.store_id: StoreOutcome(1)}, invalid_block_ids=[engine.tables["bad"][0][0].block_id])
    else:
        engine.tell({store.store_id: StoreOutcome(1, "the copy failed", "io")})
    admit_with_a_chunk(engine, request)
    request.num_computed_tokens = 0
    plan = engine.step({"bad": len(PROMPT)})
    assert not plan.releases[0].is_good and plan.stores
