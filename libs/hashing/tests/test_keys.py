import hashlib
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fingerprint import CACHE, GROUP

from hybridkv.hashing import KEY_BYTES, ChunkKeys, group_digest

PREFIX = [hashlib.sha256(bytes([i])).digest() for i in range(8)]
WINDOW = msgspec.structs.replace(GROUP, kind="window", window_tokens=256)
DRAFTER = msgspec.structs.replace(GROUP, kind="full", lookahead_tokens=64)
KEYS = ChunkKeys(msgspec.structs.replace(CACHE, groups=(GROUP, WINDOW, DRAFTER)), 64)
KEYS_OF_CACHE = ChunkKeys(CACHE, 64)


def test_a_key_is_the_same_in_every_process_and_release() -> None:
    assert KEYS.key(0, PREFIX, 128).hex() == "dd29ea47dd902ed73491641f7b18996b155434194be4d639e022a638d365364c"
    assert KEYS.key(1, PREFIX, 128).hex() == "0828a3244c9c9fb1fc2c2beda06ce5181c78b4b657ce7738be2d79e2af253c9a"


def test_a_key_depends_on_group_boundary_prefix_and_cache() -> None:
    other_cache = ChunkKeys(msgspec.structs.replace(KEYS.fingerprint, weights="other"), 64)
    keys = {
        KEYS.key(0, PREFIX, 128),
        KEYS.key(1, PREFIX, 128),
        KEYS.key(0, PREFIX, 256),
        KEYS.key(0, PREFIX[1:], 128),
        other_cache.key(0, PREFIX, 128),
    }
    assert len(keys) == 5
    assert all(len(key) == KEY_BYTES for key in keys)


def test_a_drafter_chunk_is_told_apart_by_the_token_that_follows_it() -> None:
    changed = [*PREFIX[:2], PREFIX[7], *PREFIX[3:]]
    assert KEYS.key(0, PREFIX, 128) == KEYS.key(0, changed, 128)
    assert KEYS.key(2, PREFIX, 128) != KEYS.key(2, changed, 128)


@pytest.mark.parametrize("end_token", [0, -64, 100, 576])
def test_a_boundary_without_a_prefix_hash_is_refused(end_token: int) -> None:
    with pytest.raises(ValueError, match="end_token"):
        KEYS.key(0, PREFIX, end_token)


def test_two_groups_that_are_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="share keys"):
        ChunkKeys(msgspec.structs.replace(CACHE, groups=(GROUP, GROUP)), 64)


@pytest.mark.parametrize("hash_block_tokens", [0, -1, 100])
def test_a_hash_block_must_divide_the_chunk(hash_block_tokens: int) -> None:
    with pytest.raises(ValueError, match="hash_block_tokens"):
        ChunkKeys(CACHE, hash_block_tokens)


def test_many_keys_at_once_are_the_keys_one_by_one() -> None:
    ends = [128, 256, 64, 448]
    for group in range(3):
        assert KEYS.keys(group, PREFIX, ends) == [KEYS.key(group, PREFIX, end) for end in ends]


@given(
    st.integers(0, 2),
    st.integers(1, 40),
    st.integers(0, 40),
    st.integers(1, 5),
    st.lists(st.sampled_from([16, 32, 32, 32]), min_size=4, max_size=44),
)
def test_keys_of_a_range_are_the_keys_one_by_one(
    group: int, first: int, count: int, step: int, hash_sizes: list[int]
) -> None:
    prefix = [bytes([i]) * size for i, size in enumerate(hash_sizes)]
    lookahead = 1 if group == 2 else 0
    ends = range(64 * first, 64 * (first + count), 64 * step)
    if ends and ends[-1] // 64 + lookahead > len(prefix):
        refused = next(end for end in ends if end // 64 + lookahead > len(prefix))
        with pytest.raises(ValueError, match=f"got {refused}"):
            KEYS.keys(group, prefix, ends)
    else:
        assert KEYS.keys(group, prefix, ends) == [KEYS.key(group, prefix, end) for end in ends]


def test_more_chunks_than_are_kept_for_have_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = [hashlib.sha256(bytes([i])).digest() for i in range(40)]
    monkeypatch.setattr("hybridkv.hashing.keys.MAX_KEPT_HEADS", 3)
    keys = ChunkKeys(CACHE, 64)
    for last in (2, 3, 4, 19):
        ends = range(128, 128 * last + 1, 128)
        assert keys.keys(0, prefix, ends) == [KEYS_OF_CACHE.key(0, prefix, end) for end in ends]


def test_the_last_hash_of_a_key_is_the_one_that_changes_it() -> None:
    assert KEYS.last_hash(0, PREFIX, 128) == PREFIX[1]
    assert KEYS.last_hash(2, PREFIX, 128) == PREFIX[2]
    assert KEYS.last_hash(0, PREFIX, 512) == PREFIX[7]
    assert KEYS.last_hash(2, PREFIX, 512) is None


@pytest.mark.parametrize("ends", [[64, 100], range(64, 101, 36), range(64, -1, -64), range(0, 65, 64)])
def test_many_keys_are_refused_for_one_bad_boundary(ends: Iterable[int]) -> None:
    with pytest.raises(ValueError, match=r"got (100|0)$"):
        KEYS.keys(0, PREFIX, ends)


def test_prefix_hashes_of_different_lengths_give_different_keys() -> None:
    keys = {KEYS.key(0, [b"\x01" * length], 64) for length in (0, 1, 16, 32)}
    assert len(keys) == 4


def test_prefix_hashes_of_a_cache_are_its_own() -> None:
    other_cache = ChunkKeys(msgspec.structs.replace(KEYS.fingerprint, weights="other"), 64)
    tokens = list(range(128))
    assert KEYS.token_hashes().upto(tokens) == KEYS.token_hashes(lambda start, end: b"").upto(tokens)
    assert not set(KEYS.token_hashes().upto(tokens)) & set(other_cache.token_hashes().upto(tokens))
    assert KEYS.token_hashes().block_tokens == KEYS.hash_block_tokens


def test_a_group_is_what_it_holds_and_not_where_it_stands() -> None:
    assert group_digest(GROUP) == group_digest(msgspec.structs.replace(GROUP))
    assert group_digest(GROUP) != group_digest(WINDOW)
