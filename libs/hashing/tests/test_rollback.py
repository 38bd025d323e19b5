"""A request that is rolled back and grows again, read in between or not, has the hashes of its present tokens."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.hashing import HybridChunkBlockHashList, RequestBlockHashList, TokenHashes

TOKENS = st.lists(st.integers(0, 1), max_size=30)
"""Two token ids, so that a regrown request often has its former length and last tokens."""
CHANGES = st.lists(st.tuples(st.integers(0, 60), TOKENS, st.integers(0, 3)), max_size=8)
"""Each change: number of kept tokens, new tokens, and what is read then (0: nothing, 1: one hash, 2: a slice, 3:
all)."""


class Request:
    def __init__(self) -> None:
        self.all_token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def change(self, kept: int, new: list[int]) -> None:
        del self.all_token_ids[kept:]
        self.all_token_ids += new


def sha256(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def look(hashes: Any, fresh: Any, how: int) -> None:
    if how == 1 and len(fresh):
        assert hashes[len(fresh) // 2] == fresh[len(fresh) // 2]
    elif how == 2:
        assert hashes[len(fresh) // 3 :] == fresh[len(fresh) // 3 :]
    elif how == 3:
        assert list(hashes) == list(fresh)


@given(st.integers(1, 5), CHANGES)
def test_block_hashes_equal_those_of_the_present_tokens(size: int, changes: list[tuple[int, list[int], int]]) -> None:
    request = Request()
    hashes = RequestBlockHashList(request, size, sha256)
    for kept, new, how in [*changes, (0, [], 3)]:
        request.change(kept, new)
        look(hashes, RequestBlockHashList(request, size, sha256), how)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 8), CHANGES)
def test_chunk_hashes_equal_those_of_the_present_tokens(
    sizes: list[int], chunk: int, changes: list[tuple[int, list[int], int]]
) -> None:
    request = Request()
    hashes = HybridChunkBlockHashList(request, sizes, chunk, sha256)
    for kept, new, how in [*changes, (60, [], 3)]:
        request.change(kept, new)
        look(hashes, HybridChunkBlockHashList(request, sizes, chunk, sha256), how)


@given(st.integers(1, 5), CHANGES, st.booleans())
def test_token_hashes_equal_those_of_the_present_tokens(
    size: int, changes: list[tuple[int, list[int], int]], is_told: bool
) -> None:
    request, before = Request(), [0]
    hashes = TokenHashes(size)
    for kept, new, how in [*changes, (60, [], 1)]:
        request.change(kept, new)
        before[:] = [min(before[0], kept)]
        if how:
            told = before[0] if is_told else 0
            tokens = request.all_token_ids
            assert hashes.prefix_hashes(tokens, told) == TokenHashes(size).prefix_hashes(tokens)
            before[0] = request.num_tokens


@pytest.mark.parametrize("regrown", [[2] * 400, [2] * 399 + [1], [2] + [1] * 399])
def test_blocks_that_were_cut_and_grown_again_are_hashed_again(regrown: list[int]) -> None:
    request = Request()
    request.change(0, [1] * 750)
    hashes, chain = RequestBlockHashList(request, 50, sha256), TokenHashes(50)
    before, chained = hashes[:], list(chain.prefix_hashes(request.all_token_ids))
    request.change(350, regrown)
    assert len(hashes) == len(before) == 15
    for now, then in ((hashes[:], before), (chain.prefix_hashes(request.all_token_ids), chained)):
        assert [a == b for a, b in zip(now, then, strict=True)] == [True] * 7 + [False] * 8
