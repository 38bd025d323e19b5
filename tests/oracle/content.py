"""Expected bytes of every cache cell, as a pure function of the token prefix.

A cell is the content of one token (or one compressed run of tokens, or one recurrent state) in one layer of one group.
Its bytes depend on every token up to and including that position, on the group and on the layer, and fill the whole
cell, so that a shift, a swap, a stale page or a zeroed page never looks right. It is no cipher but 64-bit mixing, so
that a scenario takes milliseconds. The same digests choose the next token, so that outputs can be compared too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

VOCABULARY_TOKENS: Final = 1000
_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def mix(words: Words) -> Words:
    """64-bit finalizer (bijective, every input bit reaches every output bit). Returns a new array."""
    mixed = words + np.uint64(_STEP)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _mix_one(word: int) -> int:
    word = (word + _STEP) & _MASK
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def layer_salt(group: int, layer: int) -> int:
    """64 bits that differ for every layer of every group."""
    return _mix_one((group << 20) + layer + 1)


def cells(digests: Words, salts: Seq[int], words_per_cell: int) -> Words:
    """Bytes of all cells of some layers: `[len(digests), len(salts), words_per_cell]`, 8 bytes a word."""
    keyed = mix(digests[:, None] ^ np.array(salts, dtype=np.uint64)[None, :])
    counter = np.arange(1, words_per_cell + 1, dtype=np.uint64) * np.uint64(_SECOND)
    return mix(keyed[:, :, None] + counter)


class Transcript:
    """The only correct run of a request: its prompt, the tokens it must produce, and the digest of every prefix.

    Another `salt` is another model: none of its bytes and hardly a token is the same.
    """

    __slots__ = ("_expected", "digests", "num_outputs", "num_prompt_tokens", "tokens")

    def __init__(self, prompt: Seq[int], num_outputs: int, salt: int = 0) -> None:
        tokens = list(prompt)
        digests: list[int] = []
        digest = _mix_one(salt) if salt else 0
        for token in tokens:
            digest = _mix_one(digest ^ (token + 1))
            digests.append(digest)
        for _ in range(num_outputs):
            token = _mix_one(digest ^ _FIRST) % VOCABULARY_TOKENS
            tokens.append(token)
            digest = _mix_one(digest ^ (token + 1))
            digests.append(digest)
        self.tokens = tokens
        self.num_prompt_tokens = len(prompt)
        self.num_outputs = num_outputs
        self.digests: Words = np.array(digests, dtype=np.uint64)
        self._expected: dict[int, Words] = {}

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def expected(self, plane: int, salts: Seq[int], tokens_per_cell: int, shape: tuple[int, ...]) -> Words:
        """All cells of plane number `plane` (the caller's name for one set of same-shaped layers), computed once.

        Cell `i` is keyed by the prefix that ends with its last token. `shape` is `[layers, ...words]`. Returns
        `[num_tokens // tokens_per_cell, *shape]`.
        """
        found = self._expected.get(plane)
        if found is None:
            last = self.digests[tokens_per_cell - 1 :: tokens_per_cell]
            words = int(np.prod(shape[1:]))
            found = cells(last, salts, words).reshape(len(last), *shape)
            self._expected[plane] = found
        return found


def garbage(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    """Words that equal no expected cell, except with probability about 2**-64 per word."""
    return generator.integers(0, _MASK, size=shape, dtype=np.uint64, endpoint=True)
