"""What of an ended request no state can use leaves the tiers before what others need, and only that."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from test_store_bursts import CHUNK_TOKENS, KIB, MIB, Engine

from hybridkv.connectors.vllm.stored_path import StoredPath
from hybridkv.planner import LookupResult

FULL_INDEX, STATE_INDEX = 0, 1
FULL_BYTES = 128 * KIB
"""Of one FULL chunk."""


def demoted(engine: Engine, name: str) -> list[int]:
    """Numbers of the request's FULL chunks, from 1, that go first."""
    keys, count = engine.states[name].keys(), engine.num_computed(name) // CHUNK_TOKENS
    ends = ((number, number * CHUNK_TOKENS) for number in range(1, count + 1))
    return [number for number, end in ends if engine.stack.is_demoted(keys.key(FULL_INDEX, end))]


def ask(engine: Engine, name: str, prompt: int, answer: int) -> None:
    """A request with a state at its prompt's end, if it has a prompt beyond what it was resumed from."""
    engine.compute(name, prompt - 1, has_states=False)
    engine.compute(name, 1)
    if answer:
        engine.compute(name, answer, has_states=False)


def pass_by(engine: Engine, name: str, num_chunks: int | None = None) -> None:
    """Somebody else stores so many chunks; None: as many as it takes until nobody is waited for any more."""
    if num_chunks is None:
        num_chunks = engine.planner._stranded._patience_bytes // FULL_BYTES
    ask(engine, name, num_chunks, 0)
    engine.end(name)
    engine.settle()


def test_chunks_behind_the_deepest_state_go_first_when_nobody_comes_for_them(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        ask(engine, "a", 4, 3)
        engine.end("a")
        pass_by(engine, "b", 8)
        assert demoted(engine, "a") == [], "the next turn may come"
        pass_by(engine, "c")
        assert demoted(engine, "a") == [5, 6, 7]
        assert demoted(engine, "b") == demoted(engine, "c") == []


def test_a_request_that_has_not_ended_gives_up_nothing(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        ask(engine, "a", 4, 3)
        pass_by(engine, "b")
        assert demoted(engine, "a") == [], "the next state may come"


def test_what_waits_beyond_a_bound_goes_first_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.connectors.vllm.stranded.MAX_WAITING", 4)
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        for name in ("a", "b"):
            ask(engine, name, 4, 3)
            engine.end(name)
        assert (demoted(engine, "a"), demoted(engine, "b")) == ([5, 6, 7], [])


@pytest.mark.parametrize("is_ended", [True, False])
def test_an_answer_makes_room_for_others_before_an_older_prompt_does(tmp_path: Path, is_ended: bool) -> None:
    near_bytes = 24 * MIB
    with Engine(tmp_path / "store", near_bytes) as engine:
        ask(engine, "older", 6, 0)
        engine.end("older")
        ask(engine, "a", 2, 20)
        if is_ended:
            engine.end("a")
        pass_by(engine, "b")
        last = engine.states["a"].keys().key(FULL_INDEX, 22 * CHUNK_TOKENS)
        assert engine.near.lookup(last) is LookupResult.HIT
        ask(engine, "c", (near_bytes - engine.near.used_bytes) // FULL_BYTES + 8, 0)
        assert (engine.resumable("older", engine.near) == 6 * CHUNK_TOKENS) is is_ended


def test_what_another_request_has_met_is_not_given_up(tmp_path: Path) -> None:
    """A sibling shares the answer, and has its own state behind it, also where it ends first."""
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        ask(engine, "a#1", 4, 3)
        ask(engine, "a#2", 6, 0)
        engine.end("a#2")
        engine.end("a#1")
        pass_by(engine, "b")
        assert demoted(engine, "a#2") == []
        assert demoted(engine, "a#1") == [7], "nobody else has the last one"
        assert engine.resumable("a#2", engine.near) == 6 * CHUNK_TOKENS


def test_whoever_comes_for_it_in_time_keeps_it(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        ask(engine, "a#1", 4, 3)
        engine.end("a#1")
        ask(engine, "a#2", 7, 0)
        engine.end("a#2")
        pass_by(engine, "b")
        assert demoted(engine, "a#1") == demoted(engine, "a#2") == []


def test_whoever_meets_what_was_given_up_makes_it_recent(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        ask(engine, "a#1", 4, 3)
        engine.end("a#1")
        pass_by(engine, "b")
        ask(engine, "a#2", 7, 0)
        assert demoted(engine, "a#1") == []


def test_what_a_slower_tier_had_already_is_not_given_up(tmp_path: Path) -> None:
    """Others stored it, and may have a state behind it."""
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        ask(engine, "a#1", 8, 0)
        engine.end("a#1")
        engine.settle()
        for key in engine.states["a#1"].path.keys.values():
            engine.near.invalidate(key)
        ask(engine, "a#2", 4, 4)
        engine.end("a#2")
        pass_by(engine, "b")
        assert demoted(engine, "a#2") == []


def test_what_was_resumed_is_not_given_up_though_its_state_is_not_the_requests_own(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        engine._begin("a").request.num_computed_tokens = 3 * CHUNK_TOKENS
        engine.compute("a", 4, has_states=False)
        engine.end("a")
        pass_by(engine, "b")
        assert demoted(engine, "a") == [4, 5, 6, 7]


def test_a_superseded_state_stays_so_when_its_path_is_made_recent(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 32 * MIB) as engine:
        for _ in range(3):
            engine.compute("a", 2)
        keys = engine.states["a"].keys()
        old = [keys.key(STATE_INDEX, number * CHUNK_TOKENS) for number in (1, 2)]
        engine.stack.demote(old)
        engine.compute("a", 6)
        engine.end("a")
        engine.settle()
        assert engine.stack.without_demoted(old) == []
        # Which of the two goes first depends on which copy to the disk ended first.
        assert set(engine.near.eviction_order()[:2]) == set(old)
        assert engine.resumable("a", engine.near) == 12 * CHUNK_TOKENS


def test_a_superseded_state_is_not_offered_to_a_slower_tier_again(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 32 * MIB) as engine:
        engine.compute("a", 4)
        engine.settle()
        key = engine.states["a"].keys().key(STATE_INDEX, 2 * CHUNK_TOKENS)
        engine.far.invalidate(key)
        engine.stack.demote([key])
        engine.end("a")
        engine.settle()
        assert engine.far.lookup(key) is LookupResult.MISS
        assert "dropped_superseded" not in engine.stack.take_counts().moves.cascades


def test_nothing_is_remembered_of_requests_that_are_over(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        ask(engine, "a", 4, 3)
        ask(engine, "b", 2, 2)
        brought_by = engine.planner._stranded._brought_by
        assert len(brought_by) == 7 + 1 + 4 + 1
        engine.end("a")
        assert len(brought_by) == 3 + 4 + 1, "what waits for somebody to come"
        pass_by(engine, "c")
        assert len(brought_by) == 4 + 1
        engine.states.clear()  # as after a preemption, where nobody tells of an end
        gc.collect()
        assert len(brought_by) == 0


def test_of_a_request_that_is_over_only_what_waits_is_remembered(tmp_path: Path) -> None:
    """A prompt may be a thousand times as long as the answer that waits."""
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        ask(engine, "a", 4, 3)
        engine.end("a")
        path = weakref.ref(engine.states["a"].path)
        engine.states["a"].path = StoredPath()
        gc.collect()
        assert path() is None
        pass_by(engine, "b")
        assert demoted(engine, "a") == [5, 6, 7]


def test_a_reset_forgets_what_waits(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        ask(engine, "a", 4, 3)
        engine.end("a")
        engine.stack.clear()
        engine.planner.forget()
        pass_by(engine, "b")
        assert demoted(engine, "a") == [], "it is gone, and counts as nothing"
        assert not engine.planner._stranded._ended and not engine.planner._stranded._num_waiting
