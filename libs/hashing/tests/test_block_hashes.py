import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.hashing import HybridChunkBlockHashList, RequestBlockHashList

TOKENS = st.lists(st.integers(0, 9), max_size=60)
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


class Request:
    def __init__(self, token_ids: list[int]) -> None:
        self.all_token_ids = token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class SaltedRequest(Request):
    def extra_keys(self, start: int, end: int) -> tuple[str] | None:
        return ("salt",) if start == 0 else None


def sha256(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def counting() -> tuple[Callable[[Any], bytes], list[Any]]:
    hashed: list[Any] = []

    def hash_function(value: Any) -> bytes:
        hashed.append(value)
        return sha256(value)

    return hash_function, hashed


def block_oracle(tokens: list[int], size: int) -> list[bytes]:
    hashes = [bytes(32)]
    for start in range(0, len(tokens) // size * size, size):
        hashes.append(sha256((hashes[-1], tuple(tokens[start : start + size]), None)))
    return hashes[1:]


def chunk_oracle(tokens: list[int], sizes: list[int], chunk: int, index: int) -> bytes | None:
    groups = [block_oracle(tokens[: (index + 1) * chunk], size) for size in sizes]
    return sha256(tuple(hashes[-1] for hashes in groups)) if all(groups) else None


@given(TOKENS, st.integers(1, 9))
def test_every_full_block_is_hashed_with_its_parent(tokens: list[int], size: int) -> None:
    assert list(RequestBlockHashList(Request(tokens), size, sha256)) == block_oracle(tokens, size)


@given(TOKENS, st.integers(1, 9), st.lists(st.integers(0, 59), max_size=8))
def test_a_block_is_hashed_once_and_only_when_needed(tokens: list[int], size: int, order: list[int]) -> None:
    hash_function, hashed = counting()
    hashes = RequestBlockHashList(Request(tokens), size, hash_function)
    asked = [index for index in order if index < len(hashes)]
    for index in asked:
        assert hashes[index] == block_oracle(tokens, size)[index]
    assert len(hashed) == max(asked, default=-1) + 1


def test_the_length_follows_the_request_while_it_grows() -> None:
    request = Request([1, 2, 3])
    hash_function, hashed = counting()
    hashes = RequestBlockHashList(request, 2, hash_function)
    assert (len(hashes), hashes[-1]) == (1, block_oracle([1, 2], 2)[0])
    request.all_token_ids += [4, 5]
    assert hashes[:] == block_oracle([1, 2, 3, 4], 2)
    assert len(hashed) == 2


def test_a_request_that_lost_tokens_loses_their_hashes() -> None:
    request = Request([1, 2, 3, 4])
    hashes = RequestBlockHashList(request, 2, sha256)
    assert len(hashes[:]) == 2
    request.all_token_ids = [1, 2, 3]
    assert len(hashes) == 1
    request.all_token_ids = [1, 2, 5, 6]
    assert hashes[:] == block_oracle([1, 2, 5, 6], 2)


def test_a_list_of_hashes_is_indexed_like_a_list() -> None:
    tokens = list(range(10))
    hashes, plain = RequestBlockHashList(Request(tokens), 2, sha256), block_oracle(tokens, 2)
    assert [hashes[-1], hashes[-5], hashes[1:4], hashes[::-2]] == [plain[-1], plain[-5], plain[1:4], plain[::-2]]
    assert plain[2] in hashes and hashes.index(plain[3]) == 3
    for index in (5, -6):
        with pytest.raises(IndexError):
            hashes[index]


def test_extra_keys_change_their_block_and_all_after_it() -> None:
    tokens = [1, 2, 3, 4]
    salted = RequestBlockHashList(SaltedRequest(tokens), 2, sha256)
    assert salted[0] == sha256((bytes(32), (1, 2), ("salt",)))
    assert not set(salted) & set(block_oracle(tokens, 2))


def test_the_root_is_the_parent_of_the_first_block() -> None:
    assert RequestBlockHashList(Request([1]), 1, sha256, b"root")[0] == sha256((b"root", (1,), None))


@given(TOKENS, SIZES, st.integers(1, 20), st.lists(st.integers(0, 59), max_size=8))
def test_a_chunk_hash_covers_the_last_full_block_of_every_group(
    tokens: list[int], sizes: list[int], chunk: int, order: list[int]
) -> None:
    hash_function, hashed = counting()
    hashes = HybridChunkBlockHashList(Request(tokens), sizes, chunk, hash_function)
    asked = [index for index in order if index < len(hashes)]
    for index in [*asked, *range(len(hashes)), *asked]:
        assert hashes[index] == chunk_oracle(tokens, sizes, chunk, index)
    assert len(hashed) == len(set(hashed)), "a value was hashed twice"
    different = len({*hashes} - {None})
    blocks = sum(len(hashes) * chunk // size for size in set(sizes)) if different else 0
    assert len(hashed) == different + blocks, "a value was hashed without need"


@pytest.mark.parametrize(
    ("sizes", "chunk", "num_tokens"), [((544,), 64, 8704), ((50,), 10, 100), ((96, 544), 32, 9000)]
)
def test_chunks_that_complete_no_block_cost_no_hash(sizes: tuple[int, ...], chunk: int, num_tokens: int) -> None:
    hash_function, hashed = counting()
    request = Request([])
    hashes = HybridChunkBlockHashList(request, sizes, chunk, hash_function)
    for _ in range(num_tokens // chunk):
        request.all_token_ids += [0] * chunk
        assert len(hashes) - 1 < hashes.first_hashable_chunk_idx or hashes[-1]
    assert len(hashed) == len(set(hashed))


@given(SIZES, st.integers(1, 20))
def test_chunks_have_a_hash_as_soon_as_every_group_has_a_block(sizes: list[int], chunk: int) -> None:
    hashes = HybridChunkBlockHashList(Request([0] * 60), sizes, chunk, sha256)
    for index in range(len(hashes)):
        if all((index + 1) * chunk >= size for size in sizes):
            assert index >= hashes.first_hashable_chunk_idx
            assert hashes[index]
        else:
            assert hashes[index] is None


@given(TOKENS, SIZES, st.integers(1, 20))
def test_a_list_of_chunks_is_a_sequence_with_none_before_the_first_hash(
    tokens: list[int], sizes: list[int], chunk: int
) -> None:
    hashes = HybridChunkBlockHashList(Request(tokens), sizes, chunk, sha256)
    plain = [chunk_oracle(tokens, sizes, chunk, index) for index in range(len(tokens) // chunk)]
    assert list(hashes) == hashes[:] == plain
    assert list(reversed(hashes)) == hashes[::-1] == plain[::-1]
    assert b"" not in hashes
    for value in plain:
        assert value in hashes
        assert (hashes.index(value), hashes.count(value)) == (plain.index(value), plain.count(value))


@given(TOKENS, SIZES, st.integers(1, 20), st.integers(0, 59))
def test_chunks_of_a_growing_request_equal_those_of_the_final_one(
    tokens: list[int], sizes: list[int], chunk: int, cut: int
) -> None:
    request = Request(tokens[:cut])
    hashes = HybridChunkBlockHashList(request, sizes, chunk, sha256)
    first = hashes.first_hashable_chunk_idx
    assert len(hashes[first:]) == max(0, len(request.all_token_ids) // chunk - first)
    request.all_token_ids = tokens
    assert hashes[first:] == HybridChunkBlockHashList(Request(tokens), sizes, chunk, sha256)[first:]


def test_a_request_that_lost_tokens_loses_the_hashes_of_their_chunks() -> None:
    request = Request([0] * 16)
    hashes = HybridChunkBlockHashList(request, [2, 3], 4, sha256)
    assert hashes[3] and hashes[0] and hashes[1]
    request.all_token_ids = [0] * 7
    assert len(hashes) == 1
    request.all_token_ids = [0] * 7 + [1] * 9
    assert hashes[:] == HybridChunkBlockHashList(request, [2, 3], 4, sha256)[:]


def test_groups_with_one_block_size_share_their_hashes() -> None:
    hash_function, hashed = counting()
    hashes = HybridChunkBlockHashList(Request([0] * 8), [2, 2, 4], 4, hash_function)
    assert len(hashes[:]) == 2
    assert len(hashed) == 4 + 2 + 2


@pytest.mark.parametrize(("sizes", "chunk"), [([], 4), ([4, 0], 4), ([4], 0), ([4], -1)])
def test_sizes_that_are_not_positive_are_refused(sizes: list[int], chunk: int) -> None:
    with pytest.raises(ValueError, match="must"):
        HybridChunkBlockHashList(Request([]), sizes, chunk, sha256)
