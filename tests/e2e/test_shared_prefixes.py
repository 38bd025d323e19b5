"""Prompts with common prefixes find them in the store, however often the engine's cache is reset: siblings, chats,
trees.

Restored states must equal the engine's own hit at the same boundary exactly: the same requests run twice, once with the
engine's cache and once with a cache reset before each request.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import prefix_site
import pytest
from equality import require_same, require_same_output
from harness import Engine, Result
from prefix_site import IS_ASYNCHRONOUS, MODEL, Chat, Rows, chat, in_turn
from shared_prefixes import CHAT_TURNS, Workloads, found, resumable, shared_tokens
from trial import Trial, engine_keeps_every_state, hits

SIBLINGS = 5
OURS = "hybridkv"

one_token_at_a_time = pytest.mark.skipif(
    IS_ASYNCHRONOUS, reason="a control of the comparison, which is the same; its states are read between two steps"
)


@pytest.fixture(scope="module")
def watched(zoo_directory: Path) -> Iterator[Trial]:
    with prefix_site.running(zoo_directory) as running:
        yield running


@pytest.fixture
def trial(watched: Trial) -> Iterator[Trial]:
    with watched.for_one_test() as trial:
        yield trial


@pytest.fixture(scope="module")
def words() -> Workloads:
    return prefix_site.workloads()


def nothing() -> None:
    """Do nothing between two requests."""


class OwnHits:
    """The engine's own hits with its cache kept. Computed once."""

    def __init__(self, trial: Trial, words: Workloads) -> None:
        self._trial, self._words = trial, words
        self._siblings: list[Result] = []
        self._chat: Chat | None = None

    @property
    def siblings(self) -> list[Result]:
        if not self._siblings:
            self._siblings = in_turn(self._trial.engine, self._words.siblings(SIBLINGS), nothing)
            self._trial.forget()
        return self._siblings

    @property
    def chat(self) -> Chat:
        if self._chat is None:
            with engine_keeps_every_state(self._trial.engine):
                self._chat = chat(self._trial.engine, self._words, nothing)
            self._trial.forget()
        return self._chat


@pytest.fixture(scope="module")
def all_own(watched: Trial, words: Workloads) -> OwnHits:
    return OwnHits(watched, words)


@pytest.fixture
def own(trial: Trial, all_own: OwnHits) -> OwnHits:
    """Use it first in a test; it leaves nothing behind."""
    return all_own


# The model of expected hits, without an engine.


def test_later_siblings_find_the_last_boundary_before_the_branch(
    words: Workloads,
) -> None:
    prompts = words.siblings(SIBLINGS)
    assert {shared_tokens(prompts[0], prompt) for prompt in prompts[1:]} == {words.branch + words.block_tokens // 2}
    assert found(prompts, words.block_tokens, places_states=True) == [0, 0, *[words.branch] * 3]
    assert found(prompts, words.block_tokens, places_states=False) == [0] * 5


def test_branches_of_a_tree_are_found_from_their_second_sibling_on(words: Workloads) -> None:
    blocks = [hit / words.block_tokens for hit in found(words.tree(), words.block_tokens, places_states=True)]
    assert blocks == [0, 0, 1, 1, 3, 3, 4]
    assert found(words.tree(), words.block_tokens, places_states=False) == [0] * 7


# On the engine.


def test_restored_siblings_equal_the_engines_own_hits(trial: Trial, own: OwnHits, words: Workloads, rows: Rows) -> None:
    prompts, expected = words.siblings(SIBLINGS), own.siblings
    restored = in_turn(trial.engine, prompts, trial.engine.reset_prefix_cache)
    rows.add("siblings", OURS, restored)
    assert hits(restored)[2:] == [words.branch] * (SIBLINGS - 2)
    assert hits(restored) == hits(expected)
    assert trial.audit.restored_tokens == sum(hits(restored))
    require_same(trial.audit, expected, restored)


def test_three_consecutive_siblings_need_one_load(trial: Trial, own: OwnHits, words: Workloads) -> None:
    first, *others = words.siblings(SIBLINGS)
    expected = own.siblings
    before = in_turn(trial.engine, [first, others[0]], trial.engine.reset_prefix_cache)
    trial.lose_cache()
    in_a_row = in_turn(trial.engine, others[1:], nothing)
    assert [num_tokens for _, num_tokens, _ in trial.audit.loads] == [words.branch]
    assert hits(in_a_row) == [words.branch] * 3
    require_same(trial.audit, expected, [*before, *in_a_row])


@pytest.mark.full
def test_a_restored_tree_equals_the_engines_own_hits(trial: Trial, words: Workloads, rows: Rows) -> None:
    prompts = words.tree()
    expected = in_turn(trial.engine, prompts, nothing)
    trial.forget()
    restored = in_turn(trial.engine, prompts, trial.engine.reset_prefix_cache)
    rows.add("tree", OURS, restored)
    promised = found(prompts, words.block_tokens, places_states=True)
    assert all(hit >= least for hit, least in zip(hits(restored), promised, strict=True)), hits(restored)
    assert hits(restored) == hits(expected)
    assert trial.audit.restored_tokens == sum(hits(restored))
    require_same(trial.audit, expected, restored)


@pytest.mark.full
def test_guessed_stops_only_add_hits_and_cost_no_load(trial: Trial, words: Workloads) -> None:
    """Stops at positions where prompts have not differed yet; their number grows with the number of requests."""
    for prompts in (words.tree(), words.siblings(SIBLINGS)):
        restored = in_turn(trial.engine, prompts, trial.engine.reset_prefix_cache, guesses=True)
        promised = found(prompts, words.block_tokens, places_states=True)
        assert all(hit >= least for hit, least in zip(hits(restored), promised, strict=True)), hits(restored)
        trial.engine.reset_prefix_cache()
    trial.audit.loads.clear()
    in_turn(trial.engine, words.siblings(SIBLINGS + 3)[SIBLINGS:], nothing, guesses=True)
    assert len(trial.audit.loads) == 1
    assert trial.audit.mismatches == []


def test_each_turn_of_a_chat_resumes_at_the_last_boundary_of_the_answer(
    trial: Trial, own: OwnHits, words: Workloads, rows: Rows
) -> None:
    expected = own.chat
    talk = chat(trial.engine, words, trial.engine.reset_prefix_cache)
    rows.add("chat", OURS, talk.results)
    boundaries = [resumable(end, words.block_tokens) for end in talk.ends[: CHAT_TURNS - 1]]
    # One answer ends exactly at a block boundary, so its last token is never computed; another ends one token later.
    assert [end % words.block_tokens for end in talk.ends[1:3]] == [0, 1]
    assert all(boundary > len(prompt) for boundary, prompt in zip(boundaries, talk.prompts, strict=False))
    assert hits(expected.results) == [0, *boundaries], "the engine's own hits are at other positions"
    assert hits(talk.results) == [0, *boundaries]
    assert trial.audit.restored_tokens == sum(boundaries)
    require_same(trial.audit, expected.results, talk.results)


# Controls.


@one_token_at_a_time
@pytest.mark.parametrize("off_by", ["nothing", pytest.param("a block", marks=pytest.mark.full), "a token"])
def test_a_state_of_another_position_in_the_prompt_is_detected(
    trial: Trial, own: OwnHits, words: Workloads, off_by: str
) -> None:
    first, second, probe, *rest = words.siblings(SIBLINGS)
    expected = own.siblings[3]
    shift = {"nothing": 0, "a block": words.block_tokens, "a token": 1}[off_by]
    state = prefix_site.state_after(trial, first[: words.branch - shift])
    in_turn(trial.engine, [first, second, probe], trial.engine.reset_prefix_cache)
    keys = prefix_site.restored_states(trial)
    prefix_site.replace_states(trial, keys, state)
    trial.lose_cache()
    [got] = trial.engine.generate([rest[0]])
    assert got.num_cached_tokens == words.branch
    if off_by == "nothing":
        require_same(trial.audit, [expected], [got])
        return
    with pytest.raises(AssertionError):
        require_same(trial.audit, [expected], [got])
    with pytest.raises(AssertionError):
        require_same_output([expected], [got])
    assert len(trial.audit.mismatches) > 0


@one_token_at_a_time
@pytest.mark.parametrize("off_by", [pytest.param("a block", marks=pytest.mark.full), "a token"])
def test_a_state_of_another_position_in_an_answer_is_detected(
    trial: Trial, own: OwnHits, words: Workloads, off_by: str
) -> None:
    first, second = own.chat.prompts[:2]
    expected = own.chat.results[1]
    boundary = resumable(own.chat.ends[0], words.block_tokens)
    shift = {"a block": words.block_tokens, "a token": 1}[off_by]
    state = prefix_site.state_after(trial, second[: boundary - shift])
    trial.engine.generate([first], max_tokens=len(own.chat.results[0].token_ids))
    trial.lose_cache()
    # Another turn than the compared one; it reveals the keys of the states.
    probe = words.next_turn(first, own.chat.results[0].token_ids, seed=99)
    [shown] = trial.engine.generate([probe])
    assert shown.num_cached_tokens == boundary
    prefix_site.replace_states(trial, prefix_site.restored_states(trial), state)
    trial.lose_cache()
    [got] = trial.engine.generate([second], max_tokens=len(expected.token_ids))
    assert got.num_cached_tokens == boundary
    with pytest.raises(AssertionError):
        require_same_output([expected], [got])
    assert len(trial.audit.mismatches) > 0


def test_the_engine_uses_the_scheduler_of_this_target(watched: Trial) -> None:
    engine: Engine = watched.engine
    assert type(engine.scheduler).__name__ == ("AsyncScheduler" if IS_ASYNCHRONOUS else "Scheduler"), MODEL
