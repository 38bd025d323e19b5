import hashlib
from collections.abc import Iterable
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fingerprint import CACHE, GROUP

from hybridkv.hashing import TAG_BYTES, ChunkKeys, group_digest

PREFIX = [hashlib.sha256(bytes([i])).digest() for i in range(8)]
WINDOW = msgspec.structs.replace(GROUP, kind="window", window_tokens=256)
DRAFTER = msgspec.structs.replace(GROUP, kind="full", lookahead_tokens=64)
KEYS = ChunkKeys(msgspec.structs.replace(CACHE, groups=(GROUP, WINDOW, DRAFTER)), 64)


def test_a_key_is_the_same_in_every_process_and_release() -> None:
    tags = ("b1453e3f9e675406b549ce0533158611", "13d9a0d0e909d5bd860b7d12281f2e06", "b09e5d31a9f5d17d6a58b8347f5f25bf")
    assert KEYS.key(0, PREFIX, 64).hex() == tags[0] + PREFIX[0].hex()
    assert KEYS.key(0, PREFIX, 128).hex() == tags[0] + PREFIX[1].hex()
    assert KEYS.key(1, PREFIX, 128).hex() == tags[1] + PREFIX[1].hex()
    assert KEYS.key(2, PREFIX, 128).hex() == tags[2] + PREFIX[2].hex()


def test_a_key_is_the_tag_of_cache_and_group_followed_by_the_prefix_hash() -> None:
    for group in range(2):
        tag = KEYS.key(group, PREFIX, 64)[:TAG_BYTES]
        assert len(tag) == TAG_BYTES == 16
        assert [KEYS.key(group, PREFIX, end) for end in (64, 128, 512)] == [tag + PREFIX[i] for i in (0, 1, 7)]
        assert KEYS.key(group, [b"short"], 64) == tag + b"short"


def test_a_key_depends_on_group_boundary_prefix_and_cache() -> None:
    other_cache = ChunkKeys(msgspec.structs.replace(KEYS.fingerprint, facts={"weights": "other"}), 64)
    keys = {
        KEYS.key(0, PREFIX, 128),
        KEYS.key(1, PREFIX, 128),
        KEYS.key(0, PREFIX, 256),
        KEYS.key(0, PREFIX[1:], 128),
        other_cache.key(0, PREFIX, 128),
    }
    assert len(keys) == 5


def test_an_adapter_has_its_own_keys_for_the_same_prefixes() -> None:
    first, second = KEYS.for_adapter(b"first"), KEYS.for_adapter(b"second")
    several = [each.key(group, PREFIX, 64) for each in (KEYS, first, second) for group in range(3)]
    assert len(set(several)) == 9
    assert first.key(0, PREFIX, 64) == KEYS.for_adapter(b"first").key(0, PREFIX, 64)
    assert first.key(0, PREFIX, 64)[TAG_BYTES:] == PREFIX[0]
    assert first.keys(0, PREFIX, range(64, 129, 64)) == [first.key(0, PREFIX, end) for end in (64, 128)]
    hashes = [list(each.token_hashes().prefix_hashes(range(64))) for each in (KEYS, first, second)]
    assert len({each[0] for each in hashes}) == 3
    with pytest.raises(ValueError, match="must not be empty"):
        KEYS.for_adapter(b"")


def test_a_drafter_key_depends_on_the_token_after_its_chunk() -> None:
    changed = [*PREFIX[:2], PREFIX[7], *PREFIX[3:]]
    assert KEYS.key(0, PREFIX, 128) == KEYS.key(0, changed, 128)
    assert KEYS.key(2, PREFIX, 128) != KEYS.key(2, changed, 128)


@pytest.mark.parametrize("end_token", [0, -64, 100, 576])
def test_a_boundary_without_a_prefix_hash_is_refused(end_token: int) -> None:
    with pytest.raises(ValueError, match="end_token"):
        KEYS.key(0, PREFIX, end_token)


def test_two_equal_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="share keys"):
        ChunkKeys(msgspec.structs.replace(CACHE, groups=(GROUP, GROUP)), 64)


@pytest.mark.parametrize("hash_block_tokens", [0, -1, 100])
def test_a_hash_block_must_divide_the_chunk(hash_block_tokens: int) -> None:
    with pytest.raises(ValueError, match="hash_block_tokens"):
        ChunkKeys(CACHE, hash_block_tokens)


def test_keys_of_many_boundaries_equal_the_single_keys() -> None:
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
def test_keys_of_a_range_equal_the_single_keys(
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


@pytest.mark.parametrize("ends", [[64, 100], range(64, 101, 36), range(64, -1, -64), range(0, 65, 64)])
def test_many_keys_are_refused_for_one_bad_boundary(ends: Iterable[int]) -> None:
    with pytest.raises(ValueError, match=r"got (100|0)$"):
        KEYS.keys(0, PREFIX, ends)


def test_prefix_hashes_of_different_lengths_give_different_keys() -> None:
    keys = {KEYS.key(0, [b"\x01" * length], 64) for length in (1, 16, 32)}
    assert len(keys) == 3


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_prefix_hash_is_refused(place: int) -> None:
    prefix = [b"" if i == place else value for i, value in enumerate(PREFIX)]
    end = 64 * (place + 1)
    with pytest.raises(ValueError, match=f"got {end}$"):
        KEYS.key(0, prefix, end)
    with pytest.raises(ValueError, match=f"got {end}$"):
        KEYS.keys(0, prefix, range(64, 193, 64))


def test_prefix_hashes_belong_to_one_cache() -> None:
    other_cache = ChunkKeys(msgspec.structs.replace(KEYS.fingerprint, facts={"weights": "other"}), 64)
    tokens = list(range(128))
    assert KEYS.token_hashes().prefix_hashes(tokens) == KEYS.token_hashes(lambda start, end: b"").prefix_hashes(tokens)
    assert not set(KEYS.token_hashes().prefix_hashes(tokens)) & set(other_cache.token_hashes().prefix_hashes(tokens))
    assert KEYS.token_hashes().block_tokens == KEYS.hash_block_tokens


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_keys_of_a_group_do_not_depend_on_its_position(order: tuple[int, ...]) -> None:
    groups = tuple(KEYS.fingerprint.groups[i] for i in order)
    moved = ChunkKeys(msgspec.structs.replace(KEYS.fingerprint, groups=groups), 64)
    for place, group in enumerate(order):
        assert moved.key(place, PREFIX, 128) == KEYS.key(group, PREFIX, 128)
    assert moved.token_hashes().prefix_hashes(list(range(128))) == KEYS.token_hashes().prefix_hashes(list(range(128)))


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "recurrent"},
        {"block_tokens": 64},
        {"window_tokens": 8},
        {"align_tokens": 8},
        {"lookahead_tokens": 128},
        {"layers": ()},
        {"layers": (GROUP.layers[0], GROUP.layers[0])},
        {"layers": (msgspec.structs.replace(GROUP.layers[0], page_bytes=1),)},
        {"layers": (msgspec.structs.replace(GROUP.layers[0], facts={}),)},
        {"layers": (msgspec.structs.replace(GROUP.layers[0], name=""),)},
    ],
)
def test_a_changed_group_shares_no_key_and_neither_do_the_others(changes: dict[str, Any]) -> None:
    changed = msgspec.structs.replace(GROUP, **changes)
    other = ChunkKeys(msgspec.structs.replace(KEYS.fingerprint, groups=(WINDOW, DRAFTER, changed)), 64)
    assert group_digest(changed) != group_digest(GROUP)
    ours, theirs = ({keys.key(group, [b"prefix"] * 8, 128) for group in range(3)} for keys in (KEYS, other))
    assert len(ours | theirs) == 6


@pytest.mark.parametrize("group", [-1, -3, 3, 5])
def test_an_unknown_group_is_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"group must be an index into the 3 groups of the fingerprint, got {group}"):
        KEYS.key(group, PREFIX, 64)
    with pytest.raises(ValueError, match=f"groups of the fingerprint, got {group}"):
        KEYS.keys(group, PREFIX, range(64, 129, 64))
    with pytest.raises(ValueError, match=f"groups of the fingerprint, got {group}"):
        KEYS.keys(group, PREFIX, [])
