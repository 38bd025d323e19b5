import hashlib
import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fingerprint import CACHE, GROUP

from hybridkv.hashing import KEY_BYTES, ChunkKeys, TokenHashes

PREFIX = [hashlib.sha256(bytes([i])).digest() for i in range(8)]
WINDOW = msgspec.structs.replace(GROUP, kind="window", window_tokens=256)
DRAFTER = msgspec.structs.replace(GROUP, kind="full", lookahead_tokens=64)
KEYS = ChunkKeys(msgspec.structs.replace(CACHE, groups=(GROUP, WINDOW, DRAFTER)), 64)


def test_a_key_is_the_same_in_every_process_and_release() -> None:
    assert KEYS.key(0, PREFIX, 128).hex() == "ddb661ba734e927a1afbbcc6421a12c1d4bf6b72b275d97100a064740463033d"
    assert KEYS.key(1, PREFIX, 128).hex() == "f9a7296923fbd7cd3218a1590de3a745e1bb5ea04e81d2ac4fe92a535bf42d97"


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


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40), st.integers(1, 7))
def test_a_prefix_hashes_alike_whether_it_grows_or_comes_at_once(tokens: list[int], cut: int, block: int) -> None:
    growing = TokenHashes(block)
    growing.upto(tokens[:cut])
    assert growing.upto(tokens) == TokenHashes(block).upto(tokens)
    assert len(growing.upto(tokens)) == len(tokens) // block


@given(st.lists(st.integers(0, 99), min_size=4, max_size=12), st.integers(0, 11))
def test_changing_a_token_changes_every_hash_from_its_block_on(tokens: list[int], place: int) -> None:
    place %= len(tokens)
    changed = [*tokens]
    changed[place] += 1
    before, after = TokenHashes(2).upto(tokens), TokenHashes(2).upto(changed)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert (a == b) == (i < place // 2)


def test_extra_content_changes_the_hashes() -> None:
    salted = TokenHashes(2, lambda start, end: b"salt" if start == 2 else b"")
    plain = TokenHashes(2)
    tokens = [1, 2, 3, 4, 5, 6]
    assert [a == b for a, b in zip(salted.upto(tokens), plain.upto(tokens), strict=True)] == [True, False, False]


def test_a_negative_token_is_refused() -> None:
    with pytest.raises(OverflowError):
        TokenHashes(1).upto([-1])


def test_keys_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    program = "from hybridkv.hashing import TokenHashes; print(TokenHashes(4).upto(list(range(16)))[-1].hex())"
    path = os.pathsep.join(p for p in sys.path if p)
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(seen) == 1
