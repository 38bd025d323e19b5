"""Stops, states of answers, tails, local copies, hints and a disk in one engine, in any order of eviction: no wrong
byte."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from hybridkv.connectors.vllm import register
from oracle.everything import FEW_CHUNKS, ORDERS, Everything, Watch, everything
from oracle.heard import Heard, heard_counts
from oracle.mixes import DEEPSEEK_V4, GEMMA3, GPT_OSS, QWEN3_NEXT, Mix
from oracle.mutants import (
    answers_one_token_late,
    evicted_in_use,
    hints_unread,
    of_another_place,
    promoted_to_each_others_places,
    stops_one_block_off,
    tails_without_length,
)
from oracle.profile import factor, profile
from oracle.rings import but_full
from oracle.scenarios import Tally
from oracle.settings import HAS_TAILS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["heard_counts"]

SCENARIOS = {QWEN3_NEXT.name: 300, GEMMA3.name: 60, GPT_OSS.name: 60, DEEPSEEK_V4.name: 60}
"""330 in all, most of them for the model with every feature, and 6,600 in the full run. With fewer only one or two
would show some of the counted events, and not on every machine."""
MUTANT_SCENARIOS = 500
"""At most: they end with the first that finds the fault."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    made.install(monkeypatch)
    return made


COUNTED = {
    "evicted": "evictions_total",
    "local bytes": "local_bytes_total",
    "stops placed": "checkpoint_stops_total",
    "superseded": "superseded_states_total",
}
BY_LABEL = {"hint": "hints_total", "keep": "keeps_total", "moves": "moves_total", "stored at": "states_stored_total"}
EVERYWHERE = (
    *("evicted", "local bytes", "hint keep", "hint no_load", "hint no_store", "keep ram kept"),
    *("moves cascade disk done", "moves promote disk done", "several at once", "hint prefetch"),
)
WITH_STATES = (
    *("stops placed", "stored at stop", "stored at answer", "stored at prompt_end", "superseded"),
    *("hits at stop", "hits at answer", "hits at prompt_end", "tails restored"),
)


def counted(heard: Heard) -> Counter[str]:
    """Counts of the connectors."""
    found: Counter[str] = Counter()
    for shown, name in COUNTED.items():
        found[shown] = int(heard.counted(name).total())
    for shown, name in BY_LABEL.items():
        for labels, value in heard.counted(name).items():
            found[" ".join((shown, *labels))] += int(value)
    return found


MIXES = (QWEN3_NEXT, GEMMA3, GPT_OSS, DEEPSEEK_V4)


@pytest.mark.parametrize("mix", but_full(MIXES, QWEN3_NEXT, GEMMA3, DEEPSEEK_V4), ids=lambda mix: mix.name)
def test_everything_at_once_never_corrupts(mix: Mix, watch: Watch, heard_counts: Heard) -> None:
    tally = Tally()

    @profile(SCENARIOS[mix.name])
    @given(everything(mix))
    def check(drawn: Everything) -> None:
        tally.add(watch.play(mix, drawn))

    check()
    happened = watch.happened + counted(heard_counts)
    print(mix.name, tally, dict(sorted(happened.items())))
    assert tally.with_failed_loads == 0
    assert tally.with_restored > tally.scenarios // 10 and tally.with_preemptions > 0, tally
    if factor() < 1:
        return  # too few scenarios for rare events
    for name in (*EVERYWHERE, *ORDERS, *(WITH_STATES if mix.has_recurrent else ())):
        assert happened[name] > 0, (name, happened)


@pytest.mark.parametrize("mix", but_full((QWEN3_NEXT, GEMMA3), QWEN3_NEXT), ids=lambda mix: mix.name)
def test_everything_at_once_never_corrupts_with_the_native_indexes(mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexes of host memory and of the disk in their own order."""
    watch, tally = Watch(is_as_shipped=True), Tally()
    watch.install(monkeypatch)

    @profile(SCENARIOS[mix.name] // 2)
    @given(everything(mix))
    def check(drawn: Everything) -> None:
        tally.add(watch.play(mix, drawn))

    check()
    assert tally.with_failed_loads == 0
    assert tally.with_restored > 0 and tally.with_preemptions > 0, tally


# Injected faults. The same scenarios must find each of them, or they prove nothing.


class FoundError(Exception):
    """A scenario showed the fault."""


MAY_SHOW: dict[str, Callable[[Everything], bool]] = {
    "answers_one_token_late": lambda drawn: any(prompt.answered for prompt in drawn.scenario.prompts),
    "evicted_in_use": lambda drawn: drawn.chunks <= FEW_CHUNKS[1],
    "promoted_to_each_others_places": lambda drawn: drawn.has_disk,
    "tails_without_length": lambda drawn: drawn.scenario.settings.hash_tokens is not None,
}
"""Scenarios in which the fault can show; the others are skipped."""


@pytest.mark.parametrize(
    "wrong",
    [
        answers_one_token_late,
        evicted_in_use,
        hints_unread,
        of_another_place,
        promoted_to_each_others_places,
        stops_one_block_off,
        pytest.param(
            tails_without_length, marks=pytest.mark.skipif(not HAS_TAILS, reason="vLLM before 0.32 has no tails")
        ),
    ],
)
def test_every_single_fault_is_found_with_all_features(
    wrong: Callable[[pytest.MonkeyPatch], None], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch)
    is_found = False

    @profile(MUTANT_SCENARIOS, whole=True)
    @given(everything(QWEN3_NEXT))
    def check(drawn: Everything) -> None:
        nonlocal is_found
        if not is_found and MAY_SHOW.get(wrong.__name__, lambda _: True)(drawn):
            try:
                is_found = watch.play(QWEN3_NEXT, drawn).failed_loads > 0
            except Exception:  # wrong bytes, or what the connector itself finds
                is_found = True
        if is_found:
            raise FoundError

    with pytest.raises(FoundError):
        check()
