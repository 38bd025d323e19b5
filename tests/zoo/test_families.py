"""Each family of models that can be resumed: a lost prefix comes back as the engine's own hit, to the last digit.

The engine's own hit is what a restored one must equal, and it must itself be the answer of the cold run: to the last
digit where both did the same arithmetic, else within what the engine's own runs deviate by.
"""

from __future__ import annotations

from collections import Counter

from equality import require_close, require_same
from families import ANSWER_TOKENS, HIT_TOKENS, PROMPT_TOKENS
from harness import make_prompt
from rows import Row
from trial import Trial, engine_keeps_every_state, hits
from zeroing import least_change, parts, zeroed

VISIBLE_CHANGE = 0.01
"""The smallest change of a log-probability that a control must cause. Rounding in another order changes it far less."""

PROMPTS = [make_prompt(length, seed=length) for length in PROMPT_TOKENS]


def test_a_restored_prefix_equals_the_engines_own_hit(trial: Trial, row: Row) -> None:
    cold = trial.one_by_one(PROMPTS)
    own = trial.one_by_one(PROMPTS)
    trial.lose_cache()
    restored = trial.one_by_one(PROMPTS)
    require_same(trial.audit, own, restored)
    assert hits(cold) == [0, 0]
    assert hits(own) == hits(restored) == list(HIT_TOKENS)
    assert trial.audit.restored_tokens == sum(HIT_TOKENS)
    require_close(trial.audit, cold, own, trial.noise)
    if trial.saved_states is not None:
        assert trial.saved_states.count > 0, "no state was saved in the middle of a prompt"
    kinds = Counter(group.kind.name for group in trial.spec.groups)
    row.groups = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    row.chunk_tokens = trial.spec.chunk_tokens
    row.restored = list(zip(hits(restored), PROMPT_TOKENS, strict=True))


def test_a_restored_next_turn_equals_the_engines_own_hit(trial: Trial, row: Row) -> None:
    first = make_prompt(PROMPT_TOKENS[0], seed=300)
    with engine_keeps_every_state(trial.engine):
        own_answer = trial.one_by_one([first], max_tokens=ANSWER_TOKENS)[0].token_ids
        second = [*first, *own_answer, *make_prompt(16, seed=301)]
        own = trial.one_by_one([second])
    trial.forget()
    assert trial.one_by_one([first], max_tokens=ANSWER_TOKENS)[0].token_ids == own_answer
    trial.lose_cache()
    restored = trial.one_by_one([second])
    assert hits(restored) == hits(own)
    assert trial.audit.restored_tokens == hits(restored)[0]
    if trial.family.needs_mamba2:
        # The engine continues in two steps where its own cache shows how far the last turn went, to keep the state at
        # that place.
        require_close(trial.audit, own, restored, trial.noise)
    else:
        require_same(trial.audit, own, restored)
    assert hits(restored) == [HIT_TOKENS[0] + ANSWER_TOKENS]
    row.next_turn = (hits(restored)[0], len(second))


def test_four_restored_requests_at_once_equal_the_engines_own_hits(trial: Trial, row: Row) -> None:
    length = PROMPT_TOKENS[1]
    stems = [make_prompt(HIT_TOKENS[0], seed=400 + i) for i in range(2)]
    prompts = [make_prompt(length, seed=500 + i, prefix=stems[i % 2]) for i in range(4)]
    trial.one_by_one(prompts)
    own = trial.engine.generate(prompts)
    trial.lose_cache()
    restored = trial.engine.generate(prompts)
    require_same(trial.audit, own, restored)
    assert all(len(result.steps[0].batch) == 4 for result in restored), "the requests did not run together"
    assert hits(own) == hits(restored) == [HIT_TOKENS[1]] * 4
    row.at_once = [(hit, length) for hit in hits(restored)]


def test_another_prefix_gives_another_output(trial: Trial) -> None:
    """The control of all other tests: output from the wrong prefix would be detected."""
    mine = PROMPTS[0]
    other = [*make_prompt(HIT_TOKENS[0], seed=600), *mine[HIT_TOKENS[0] :]]
    ours, theirs = trial.one_by_one([mine, other])
    assert ours.token_ids != theirs.token_ids
    assert least_change(ours, theirs) > VISIBLE_CHANGE


def test_each_part_that_a_group_stores_changes_log_probabilities(trial: Trial, row: Row) -> None:
    prompt = PROMPTS[1]
    own = trial.one_by_one([prompt, prompt], max_tokens=1)[1]
    shown: Counter[str] = Counter()
    for group_index in trial.spec.stored_groups:
        for part in parts(trial.engine, group_index):
            trial.lose_cache()
            with zeroed(trial.engine, trial.audit, group_index, part):
                without = trial.one_by_one([prompt], max_tokens=1)
            assert hits(without) == [HIT_TOKENS[1]]
            assert any(f"group {group_index} " in mismatch for mismatch in trial.audit.mismatches)
            change = least_change(own, without[0])
            assert change > VISIBLE_CHANGE, f"group {group_index} without its {part} answers the same: {change}"
            shown[part] += 1
    trial.lose_cache()
    whole = trial.one_by_one([prompt], max_tokens=1)
    assert whole[0].same_output(own), "the zeroed part was not restored"
    row.controls = [f"{part} of {count}" for part, count in shown.items()]
