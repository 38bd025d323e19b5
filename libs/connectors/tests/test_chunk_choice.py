"""How long a chunk is: as before where no block can be cut, and within reach where one can."""

from __future__ import annotations

import pytest

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.chunk_choice import choose_chunk
from hybridkv.planner import GroupKind, GroupSpec

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
        ((STATE, CUT), 32, 4_000_000, 65536 * 33),  # cut only where it must be
        ((STATE, CUT), 32, 98304, 65536),
        ((CUT,), 32, 1000, 128),
        ((SMALL,), 4096, 98304, 4096),  # chunks are named by hashes
    ],
)
def test_an_automatic_chunk_cuts_no_block_unless_no_prompt_could_hit(
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
def test_what_is_refused_comes_with_what_would_work(
    groups: tuple[GroupSpec, ...], wanted: int, expected: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        choose_chunk(groups, wanted, 98304, 32)
    assert caught.value.path == "kv_connector_extra_config.chunk_tokens"
    assert expected in caught.value.expected and caught.value.hint.startswith(hint)
