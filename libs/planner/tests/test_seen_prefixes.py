"""Table of seen prefixes: how far a prompt went on, where other requests diverged, what is old; and its bound."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.planner import NO_EXPERIENCE, Placement, Prompt, SeenPrefixes, Stop, StopReason, StoreUsage
from hybridkv.planner.checkpoints.seen import Grain, offsets

B = 128


def keys_of(text: str) -> list[str]:
    return [text[: end + 1] for end in range(len(text))]


def usage(bytes_ever: float = 0.0, capacity_bytes: int = 1_000) -> StoreUsage:
    return StoreUsage(capacity_bytes, 0, msgspec.structs.replace(NO_EXPERIENCE, bytes_ever=bytes_ever))


def prompt_of(text: str, resumed: int = 0, held: int = 0) -> Prompt:
    """A prompt of one token more than its boundaries: it can resume at all of them."""
    return Prompt(len(text) * B + 1, resumed * B, held * B)


def visit(
    seen: SeenPrefixes, text: str, resumed: int = 0, held: int = 0, guess: int = 0, at: float = 0.0, again: bool = False
) -> Prompt:
    asked = msgspec.structs.replace(prompt_of(text, resumed, held), starts_over=again)
    prompt = seen.add_facts(B, keys_of(text), asked, usage(at))
    stops = (Stop(guess * B, StopReason.SPACED),) if guess else ()
    seen.note(B, keys_of(text), prompt, Placement(stops, boundary_tokens=B), usage(at))
    return prompt


def test_the_first_divergence_tells_its_distance_from_the_end() -> None:
    seen = SeenPrefixes(100)
    visit(seen, "abcdefgh")
    assert visit(seen, "abcxyz", held=3).earlier_rest_tokens == 5 * B


def test_a_request_that_resumes_at_a_known_divergence_is_not_the_first() -> None:
    seen = SeenPrefixes(100)
    visit(seen, "abcdefgh")
    visit(seen, "abcxyz", held=3)
    assert visit(seen, "abcuvw", resumed=3, held=3).earlier_rest_tokens == 0


def test_a_useful_guess_counts_as_one_divergence() -> None:
    seen = SeenPrefixes(100)
    visit(seen, "abcdefgh", guess=3)
    assert visit(seen, "abcxyz", resumed=3, held=3).earlier_rest_tokens == 5 * B
    assert visit(seen, "abcuvw", resumed=3, held=3).earlier_rest_tokens == 0


def test_the_next_turn_of_a_chat_is_no_divergence() -> None:
    seen = SeenPrefixes(100)
    visit(seen, "abc")
    assert visit(seen, "abcdef", resumed=3, held=3).earlier_rest_tokens == 0


def test_a_divergence_is_a_branch_of_requests_that_compute_it_again() -> None:
    seen = SeenPrefixes(100)
    visit(seen, "abcdefgh")
    visit(seen, "abcxyz", held=3)
    assert visit(seen, "abcdefgh").branches == (3 * B,)
    assert visit(seen, "abcdefgh", resumed=3, held=3).branches == ()


def test_a_restarted_request_does_not_diverge_from_itself() -> None:
    """Whether it finds chunks that it stored itself, with a state of its own guess or without."""
    for resumed, held in ((0, 4), (3, 3), (3, 4)):
        seen = SeenPrefixes(100)
        visit(seen, "abcdefgh", guess=3)
        assert visit(seen, "abcdefgh", resumed, held, again=True).earlier_rest_tokens == 0
        assert seen.add_facts(B, keys_of("abcdefgh"), prompt_of("abcdefgh"), usage()).branches == ()
        assert visit(seen, "abcxyz", resumed=3, held=3).earlier_rest_tokens == 5 * B, (
            "its guess has served no other request yet"
        )


def test_a_restarted_request_gets_the_branch_at_its_own_divergence() -> None:
    seen = SeenPrefixes(100)
    visit(seen, "abcdefgh")
    visit(seen, "abcxyz", held=3)
    assert visit(seen, "abcxyz", again=True).branches == (3 * B,)


def test_only_chunks_that_were_unused_for_long_are_old() -> None:
    seen = SeenPrefixes(100)
    visit(seen, "abcdef", at=0.0)
    visit(seen, "abxy", resumed=2, held=2, at=900.0)
    assert visit(seen, "abcdefgh", resumed=6, held=6, at=1_000.0).aged_tokens == 4 * B
    assert visit(seen, "abcdefgh", resumed=6, held=6, at=1_100.0).aged_tokens == 0


def test_forgotten_prefixes_only_teach_nothing() -> None:
    seen = SeenPrefixes(3)
    visit(seen, "abcdefgh")
    assert (len(seen), seen.num_forgotten) == (3, 5)
    assert visit(seen, "abcdxy", held=4).earlier_rest_tokens == 0
    assert visit(seen, "abz", held=2).earlier_rest_tokens == 6 * B


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="max_chunks"):
        SeenPrefixes(-1)


@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.text("ab", max_size=8), st.integers(0, 10), st.integers(0, 10), st.integers(0, 8))),
)
def test_the_table_stays_bounded_and_answers_within_the_prompt(
    max_chunks: int, visits: list[tuple[str, int, int, int]]
) -> None:
    seen = SeenPrefixes(max_chunks)
    for clock, (text, resumed, held, guess) in enumerate(visits):
        start = min(resumed, len(text))
        prompt = visit(seen, text, start, held, min(guess, len(text)), at=400.0 * clock)
        assert len(seen) <= max_chunks
        assert 0 <= prompt.aged_tokens <= prompt.resumed_tokens
        assert prompt.earlier_rest_tokens >= 0
        assert all(prompt.resumed_tokens < at < prompt.end_boundary(B) for at in prompt.branches)
        assert prompt.reused_divergence_share >= 0 and 0 <= prompt.missed_tokens <= prompt.end_boundary(B)
        learned = {
            "earlier_rest_tokens": 0,
            "aged_tokens": 0,
            "missed_tokens": 0,
            "is_divergence_unknown": False,
            "reused_divergence_share": 0.0,
        }
        assert msgspec.structs.replace(prompt, branches=(), **learned) == prompt_of(text, start, held)


# Prompts with more boundaries than are looked at.

COARSE = Grain(max_places=12, fine_places=4, coarse_step=4)
FINE = Grain(max_places=10_000, fine_places=4, coarse_step=4)


@given(st.integers(0, 400), st.integers(1, 9), st.integers(1, 9), st.integers(2, 9))
def test_the_places_use_the_budget_and_include_all_of_the_last_ones(
    num_places: int, fine: int, step: int, coarse: int
) -> None:
    grain = Grain(max_places=fine + coarse, fine_places=fine, coarse_step=step)
    places = grain.places(num_places)
    assert list(places) == sorted({*places}, reverse=True)
    assert len(places) <= grain.max_places
    assert {*range(max(1, num_places - fine + 1), num_places + 1)} <= {*places} <= {*range(1, num_places + 1)}
    if num_places <= fine + step * (coarse - 1):
        assert {grain.cell(place) for place in range(1, num_places + 1)} <= {*places}
    for place in range(1, num_places + 1):
        assert 0 <= place - grain.cell(place) < step and 0 <= grain.next_coarse(place) - place < step


@pytest.mark.parametrize("numbers", [(4, 4, 1), (5, 4, 1), (8, 0, 1), (8, 4, 0)])
def test_a_grain_without_places_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="grain"):
        Grain(*numbers)


@given(st.integers(0, 1 << 40))
def test_the_offsets_of_marks_are_their_bits(marks: int) -> None:
    found = list(offsets(marks))
    assert sum(1 << offset for offset in found) == marks and found == sorted({*found}, reverse=True)


forks = st.tuples(st.integers(0, 60), st.text("ab", max_size=30))
"""Where a prompt leaves the common path, and its content from there on."""


@given(
    st.text("ab", min_size=20, max_size=60),
    st.lists(st.tuples(forks, st.integers(0, 60), st.integers(0, 60)), max_size=12),
    forks,
    st.integers(0, 60),
)
def test_a_long_prompt_finds_no_false_branch_and_all_branches_near_its_end(
    path: str, visits: list[tuple[tuple[int, str], int, int]], fork: tuple[int, str], resumed: int
) -> None:
    coarse, fine = SeenPrefixes(10_000, COARSE), SeenPrefixes(10_000, FINE)
    for clock, ((cut, more), start, held) in enumerate(visits):
        text = path[:cut] + more
        asked, at = prompt_of(text, min(start, len(text)), min(held, len(text))), usage(300.0 * clock)
        prompt = fine.add_facts(
            B, keys_of(text), asked, at
        )  # both know as precisely as they look whether a path goes on
        for seen in (coarse, fine):
            seen.note(B, keys_of(text), prompt, Placement(boundary_tokens=B), at)
    last = path[: fork[0]] + fork[1]
    asked, now = prompt_of(last, min(resumed, len(last))), usage(300.0 * len(visits))
    got, wanted = (seen.add_facts(B, keys_of(last), asked, now) for seen in (coarse, fine))
    assert len(wanted.branches) < 16
    assert {*got.branches} <= {*wanted.branches}
    near = {at for at in wanted.branches if at > (len(last) - COARSE.fine_places) * B}
    assert near <= {*got.branches}
    # The places that are looked at earlier tell where the branches after them are.
    if len(last) <= COARSE.fine_places + COARSE.coarse_step * (COARSE.max_places - COARSE.fine_places - 1):
        assert got.branches == wanted.branches
    assert wanted.aged_tokens <= got.aged_tokens <= got.resumed_tokens


@given(st.integers(8, 60), st.integers(1, 60), st.integers(1, 30))
def test_a_divergence_near_the_end_of_a_long_prompt_tells_its_distance(
    num_places: int, held: int, num_more: int
) -> None:
    seen, held = SeenPrefixes(10_000, COARSE), min(held, num_places - 1)
    visit(seen, "a" * num_places)
    parted = visit(seen, "a" * held + "b" * num_more, held=held).earlier_rest_tokens
    if num_places <= COARSE.max_places or num_places - held < COARSE.fine_places:
        assert parted == (num_places - held) * B
    else:
        assert parted in (0, (num_places - held) * B)


def test_a_long_prompt_takes_only_the_looked_up_places_of_the_table() -> None:
    seen = SeenPrefixes(1 << 16)
    keys = range(1 << 16)
    for _ in range(2):
        prompt = seen.add_facts(B, keys, Prompt((1 << 16) * B + 1), usage())
        seen.note(B, keys, prompt, Placement(boundary_tokens=B), usage())
    assert len(seen) <= Grain().max_places and seen.num_forgotten == 0


def test_a_divergence_on_another_path_is_no_branch() -> None:
    seen = SeenPrefixes(10_000, COARSE)
    visit(seen, "a" * 30)
    visit(seen, "a" * 17 + "b" * 13, held=17)
    assert visit(seen, "a" * 30).branches == (17 * B,)
    assert visit(seen, "a" * 16 + "c" * 14).branches == ()


def test_using_a_long_prompt_counts_as_using_all_of_it() -> None:
    seen = SeenPrefixes(10_000, COARSE)
    visit(seen, "a" * 30, at=900.0)
    assert visit(seen, "a" * 9, resumed=6, at=1_000.0).aged_tokens == 0
    assert visit(seen, "a" * 9, resumed=6, at=1_200.0).aged_tokens == 0, "it was used a moment ago"
    assert visit(seen, "a" * 6 + "b" * 24, resumed=6, at=1_500.0).aged_tokens == 6 * B
