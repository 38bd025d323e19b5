"""Choice of the chunk length, for groups with and without blocks that can be cut."""

from __future__ import annotations

from typing import Literal

import pytest

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.layout import MAX_CHUNK_BLOCKS_WITH_TAILS, choose_chunk, choose_tail
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec

STATE = GroupSpec(GroupKind.RECURRENT, 65536)
FULL = GroupSpec(GroupKind.FULL, 1056)
CUT = GroupSpec(GroupKind.FULL, 1056, part_tokens=32)
SMALL = GroupSpec(GroupKind.FULL, 16, part_tokens=8)
SCRATCH = GroupSpec(GroupKind.SCRATCH, 4096)


@pytest.mark.parametrize(
    ("groups", "hash_tokens", "max_model_len", "chunk"),
    [
        ((FULL,), 1056, 4096, 1056),
        ((SMALL, SCRATCH), 8, 4096, 128),
        ((STATE, FULL), 32, 4_000_000, 65536 * 33),
        ((STATE, CUT), 32, 4_000_000, 65536 * 33),  # cut only if necessary
        ((STATE, CUT), 32, 98304, 65536),
        ((CUT,), 32, 1000, 128),
        ((SMALL,), 4096, 98304, 4096),  # chunks are identified by hashes
    ],
)
def test_an_automatic_chunk_cuts_blocks_only_if_no_prompt_could_hit_otherwise(
    groups: tuple[GroupSpec, ...], hash_tokens: int, max_model_len: int, chunk: int
) -> None:
    assert choose_chunk(groups, "auto", max_model_len, hash_tokens) == chunk
    assert choose_chunk(groups, chunk, max_model_len, hash_tokens) == chunk


@pytest.mark.parametrize(
    ("groups", "wanted", "expected", "hint"),
    [
        ((STATE, CUT), 16384, "a multiple of 65536 tokens", 'use 65536, or "auto"'),
        ((STATE, CUT), 131072, "less than max_model_len", "use 65536, or raise --max-model-len above 131072"),
        ((STATE, FULL), 65536, "a multiple of 2162688 tokens", "raise --max-model-len above 2162688"),
        ((STATE, FULL), "auto", "less than max_model_len", "raise --max-model-len above 2162688"),
        ((CUT,), 100, "a multiple of 32 tokens", 'use 96, or "auto"'),
        ((CUT,), 7, "a multiple of 32 tokens", 'use 32, or "auto"'),
    ],
)
def test_a_refused_chunk_comes_with_a_valid_value(
    groups: tuple[GroupSpec, ...], wanted: int, expected: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        choose_chunk(groups, wanted, 98304, 32)
    assert caught.value.path == "kv_connector_extra_config.chunk_tokens"
    assert expected in caught.value.expected and caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("groups", "wanted", "named"),
    [
        (
            (STATE, FULL),
            "auto",
            "multiples of 2162688 tokens; without group 0 (recurrent, blocks of 65536 tokens), multiples of 1056 ",
        ),
        (
            (FULL, FULL, SCRATCH, STATE),
            65536,
            "; without group 3 (recurrent, blocks of 65536 tokens), multiples of 1056 tokens would be enough",
        ),
        (
            (SMALL, *[GroupSpec(GroupKind.WINDOW, 7168, window_tokens=64)] * 2, GroupSpec(GroupKind.FULL, 98303)),
            "auto",
            "; without group 3 (full, blocks of 98303 tokens), multiples of 7168 tokens would be enough",
        ),
        (
            (FULL, *[GroupSpec(GroupKind.WINDOW, 65536, window_tokens=64)] * 2),
            "auto",
            "without group 1 (window, blocks of 65536 tokens), 2 (window, blocks of 65536 tokens)",
        ),
    ],
)
def test_a_refused_common_multiple_names_the_groups_that_enlarge_it(
    groups: tuple[GroupSpec, ...], wanted: int | Literal["auto"], named: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        choose_chunk(groups, wanted, 98304, 32)
    assert named in caught.value.expected


def test_a_refusal_names_no_group_if_all_are_equal() -> None:
    with pytest.raises(ConfigurationError) as caught:
        choose_chunk((STATE, STATE), "auto", 65536, 32)
    assert caught.value.expected.endswith("the groups need multiples of 65536 tokens")


HYBRID = (GroupSpec(GroupKind.RECURRENT, 128), GroupSpec(GroupKind.FULL, 128), GroupSpec(GroupKind.SCRATCH, 16))


@pytest.mark.parametrize("chunk", [128, 256, 128 * MAX_CHUNK_BLOCKS_WITH_TAILS])
def test_tails_end_where_hits_of_the_engine_end(chunk: int) -> None:
    assert choose_tail(CacheSpec(HYBRID, chunk), 32, 32) == 32


@pytest.mark.parametrize(
    ("groups", "chunk", "hit_tokens", "hash_tokens"),
    [
        pytest.param(HYBRID, 128, None, 32, id="an engine that does not say"),
        pytest.param(HYBRID, 128, 128, 32, id="hits that end with blocks"),
        pytest.param(HYBRID, 256, 128, 128, id="hits that end with blocks inside a chunk"),
        pytest.param(HYBRID, 128, 48, 32, id="hits between hashes"),
        pytest.param(HYBRID, 128 * (MAX_CHUNK_BLOCKS_WITH_TAILS + 1), 32, 32, id="chunks of many blocks"),
        pytest.param(HYBRID[1:], 128, 32, 32, id="no states"),
        pytest.param(HYBRID[:1], 128, 32, 32, id="nothing but states"),
        pytest.param((*HYBRID, GroupSpec(GroupKind.WINDOW, 32, window_tokens=64)), 128, 32, 32, id="windows"),
        pytest.param((*HYBRID, GroupSpec(GroupKind.CHUNKED, 128, align_tokens=256)), 128, 32, 32, id="chunked"),
        pytest.param((HYBRID[0], GroupSpec(GroupKind.FULL, 64)), 128, 32, 32, id="blocks smaller than a state's"),
        pytest.param((HYBRID[0], GroupSpec(GroupKind.FULL, 256, part_tokens=32)), 128, 32, 32, id="cut blocks"),
        pytest.param((HYBRID[0], GroupSpec(GroupKind.FULL, 128, lookahead_tokens=32)), 128, 32, 32, id="a drafter"),
    ],
)
def test_unsupported_layouts_have_no_tails(
    groups: tuple[GroupSpec, ...], chunk: int, hit_tokens: int | None, hash_tokens: int
) -> None:
    assert choose_tail(CacheSpec(groups, chunk), hit_tokens, hash_tokens) is None
