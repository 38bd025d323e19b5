"""Searches with the smallest and largest prompts and caches."""

import pytest

from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, Hit, LookupResult, Miss, chunk_unit, longest_hit

FULL = GroupSpec(GroupKind.FULL, 16)


def stored(group: int, end: int) -> LookupResult:
    return LookupResult.HIT


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_prompt_of_at_most_one_token_is_a_miss_without_a_lookup(num_tokens: int) -> None:
    def lookup(group: int, end: int) -> LookupResult:
        raise AssertionError("looked up")

    assert isinstance(longest_hit(CacheSpec((FULL,), 16), num_tokens, 0, lookup), Miss)


@pytest.mark.parametrize("kind", [GroupKind.FULL, GroupKind.RECURRENT])
def test_one_group_hits_alone(kind: GroupKind) -> None:
    assert longest_hit(CacheSpec((GroupSpec(kind, 16),), 32), 100, 0, stored) == Hit(96)


def test_chunks_of_one_token_stop_before_the_last_token() -> None:
    assert longest_hit(CacheSpec((GroupSpec(GroupKind.FULL, 1),), 1), 2, 0, stored) == Hit(1)


def test_sixty_four_groups_agree_on_the_shortest_prefix() -> None:
    spec = CacheSpec((FULL,) * 64, 16)

    def lookup(group: int, end: int) -> LookupResult:
        return LookupResult.HIT if end <= 16 * (100 - group) else LookupResult.MISS

    assert longest_hit(spec, 10_000, 0, lookup) == Hit(16 * 37)


def test_coprime_blocks_resume_at_their_common_multiple() -> None:
    groups = (GroupSpec(GroupKind.FULL, 5), GroupSpec(GroupKind.WINDOW, 7, window_tokens=9))
    spec = CacheSpec(groups, chunk_unit(groups))
    assert longest_hit(spec, 100, 0, stored) == Hit(70)


def test_a_chunk_larger_than_every_prompt_is_a_miss_with_a_reason() -> None:
    found = longest_hit(CacheSpec((FULL,), 1 << 20), 8192, 0, stored)
    assert found == Miss(None, "8192 tokens have no boundary of 1048576 tokens beyond the 0 held")


def test_a_prompt_that_the_engine_holds_already_is_a_miss() -> None:
    assert isinstance(longest_hit(CacheSpec((FULL,), 16), 65, 64, stored), Miss)


def test_a_chunked_group_needs_nothing_where_an_attention_chunk_begins() -> None:
    spec = CacheSpec((GroupSpec(GroupKind.CHUNKED, 16, align_tokens=64), FULL), 32)

    def lookup(group: int, end: int) -> LookupResult:
        return LookupResult.HIT if group == 1 else LookupResult.MISS

    assert longest_hit(spec, 129, 0, lookup) == Hit(128)
    assert longest_hit(spec, 128, 0, lookup) == Hit(64)


def test_a_drafter_group_resumes_only_where_its_lookahead_tokens_are_known() -> None:
    spec = CacheSpec((FULL, GroupSpec(GroupKind.FULL, 16, lookahead_tokens=4)), 16)
    assert longest_hit(spec, 67, 0, stored) == Hit(48)
    assert longest_hit(spec, 68, 0, stored) == Hit(64)
