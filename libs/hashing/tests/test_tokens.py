import os
import subprocess
import sys
from array import array

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.hashing import TokenHashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def oracle(tokens: list[int], block: int, identity: bytes, extra: dict[int, bytes]) -> list[bytes]:
    """The chain as README.md describes it, one token at a time."""
    message = len(identity).to_bytes(8, "little") + identity + block.to_bytes(8, "little")
    key = blake3(message, derive_key_context="hybridkv 2026 token prefix v2").digest()
    hashes = [bytes(32)]
    for start in range(0, len(tokens) // block * block, block):
        hasher = blake3(hashes[-1], key=key)
        for token in tokens[start : start + block]:
            hasher.update(token.to_bytes(4, "little"))
        if content := extra.get(start, b""):
            hasher.update(len(content).to_bytes(8, "little") + content)
        hashes.append(hasher.digest())
    return hashes[1:]


def test_the_chain_is_the_same_in_every_process_and_release() -> None:
    assert (
        TokenHashes(4).prefix_hashes(list(range(8)))[-1].hex()
        == "9a09ae67323f3127894b0bcc4c432622a792da396d1218642d3e259b877ec807"
    )
    keyed = TokenHashes(4, lambda start, end: b"adapter", bytes(range(32)))
    assert (
        keyed.prefix_hashes([2**32 - 1] * 8)[-1].hex()
        == "2d9010a3dc84c30246c82bb96887e9f786d080c1f3763f554570545693cf4cae"
    )


@given(TOKENS, st.integers(1, 7), st.binary(max_size=40), st.dictionaries(st.integers(0, 40), st.binary(max_size=9)))
def test_the_chain_is_as_documented(tokens: list[int], block: int, identity: bytes, extra: dict[int, bytes]) -> None:
    hashes = TokenHashes(block, lambda start, end: extra.get(start, b""), identity).prefix_hashes(tokens)
    assert hashes == oracle(tokens, block, identity, extra)


@given(TOKENS, st.lists(st.integers(0, 40), max_size=4), st.integers(1, 7))
def test_a_prefix_has_the_same_hashes_however_it_grows(tokens: list[int], cuts: list[int], block: int) -> None:
    growing = TokenHashes(block)
    for cut in cuts:
        assert len(growing.prefix_hashes(tokens[:cut])) == min(cut, len(tokens)) // block
    assert growing.prefix_hashes(tokens) == TokenHashes(block).prefix_hashes(tokens)


@given(TOKENS, st.integers(0, 40), st.integers(1, 7))
def test_growing_from_known_tokens_reads_only_the_new_blocks(tokens: list[int], cut: int, block: int) -> None:
    class Tokens(list[int]):
        def __getitem__(self, index: slice) -> list[int]:  # type: ignore[override]
            seen.extend(range(*index.indices(len(self))))
            return super().__getitem__(index)

    seen: list[int] = []
    growing = TokenHashes(block)
    growing.prefix_hashes(Tokens(tokens[:cut]))
    growing.prefix_hashes(Tokens(tokens), unchanged_tokens=cut)
    assert seen == list(range(len(tokens) // block * block))


@given(st.lists(st.integers(0, 99), min_size=4, max_size=12), st.integers(0, 11))
def test_changing_a_token_changes_every_hash_from_its_block_on(tokens: list[int], place: int) -> None:
    place %= len(tokens)
    changed = [*tokens]
    changed[place] += 1
    before, after = TokenHashes(2).prefix_hashes(tokens), TokenHashes(2).prefix_hashes(changed)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert (a == b) == (i < place // 2)


def test_extra_content_changes_the_hashes_from_its_block_on() -> None:
    salted = TokenHashes(2, lambda start, end: b"salt" if start == 2 else b"")
    plain = TokenHashes(2)
    tokens = [1, 2, 3, 4, 5, 6]
    pairs = zip(salted.prefix_hashes(tokens), plain.prefix_hashes(tokens), strict=True)
    assert [a == b for a, b in pairs] == [True, False, False]


def test_chains_of_different_block_sizes_or_caches_share_no_hash() -> None:
    tokens = [7] * 12
    chains = [TokenHashes(2), TokenHashes(3), TokenHashes(2, None, b"a"), TokenHashes(2, None, b"b")]
    hashes = [hash_ for chain in chains for hash_ in chain.prefix_hashes(tokens)]
    assert len(set(hashes)) == len(hashes)


def test_tokens_may_be_any_sequence() -> None:
    tokens = list(range(64))
    for sequence in (tuple(tokens), array("I", tokens), np.array(tokens, dtype=np.int64)):
        assert TokenHashes(4).prefix_hashes(sequence) == TokenHashes(4).prefix_hashes(tokens)  # type: ignore[arg-type]


def test_a_prompt_that_lost_tokens_keeps_the_hashes_of_the_rest() -> None:
    hashes = TokenHashes(2)
    hashes.prefix_hashes([1, 2, 3, 4, 5, 6])
    assert hashes.prefix_hashes([1, 2, 3]) == TokenHashes(2).prefix_hashes([1, 2])
    assert hashes.prefix_hashes([1, 2, 7, 8]) == TokenHashes(2).prefix_hashes([1, 2, 7, 8])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_32_bits_is_refused_without_hashing(token: int) -> None:
    hashes = TokenHashes(1)
    with pytest.raises(OverflowError):
        hashes.prefix_hashes([1, token])
    assert hashes.prefix_hashes([]) == []
    assert hashes.prefix_hashes([1, 2]) == TokenHashes(1).prefix_hashes([1, 2])


@pytest.mark.parametrize("block_tokens", [0, -4])
def test_a_block_without_tokens_is_refused(block_tokens: int) -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        TokenHashes(block_tokens)


def test_hashes_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    program = "from hybridkv.hashing import TokenHashes; print(TokenHashes(4).prefix_hashes(list(range(16)))[-1].hex())"
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
