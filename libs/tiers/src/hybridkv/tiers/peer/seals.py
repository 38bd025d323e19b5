"""Answers peers' requests for the digests under which this rank sealed its chunks. Thread-safe. Reads no chunk."""

from __future__ import annotations

from hybridkv.peers.control import LinkId
from hybridkv.peers.wire import CloseReason, WireError, unpack_columns
from hybridkv.tiers.contract import FailureReason, Key, SealedMemory, Slot
from hybridkv.tiers.peer import words
from hybridkv.tiers.peer.options import MAX_KEYS

_NONE = bytes(words.DIGEST_BYTES)


class RankSeals:
    """Handler of digest requests.

    Args:
        memory: this rank's memory of the primary tier.

    """

    def __init__(self, memory: SealedMemory) -> None:
        self._memory = memory

    def question(self, link: LinkId, body: bytes) -> bytes:
        word = words.decode(body)
        if not isinstance(word, words.AskSeals):
            raise WireError(CloseReason.UNEXPECTED, type(word).__name__)
        keys = words.unpack_keys(word.keys, word.ends)
        (offsets,) = unpack_columns(word.offsets, 1, MAX_KEYS)
        if len(offsets) != len(keys):
            raise WireError(CloseReason.MALFORMED, "as many offsets as keys are needed")
        return words.encode(words.seals(self._seal(*each) for each in zip(keys, offsets.tolist(), strict=True)))

    def _seal(self, key: Key, offset: int) -> tuple[int, bytes]:
        slot = Slot(((offset, 1),))
        digest = self._memory.sealed_checksum(key, slot)
        if digest is not None:
            return words.SEALED, digest
        # Report another key's seal without reading the bytes.

        [failure] = self._memory.check_all([(key, slot)])
        is_another = failure is not None and failure.reason is FailureReason.WRONG_KEY
        return words.ANOTHER if is_another else words.NOTHING, _NONE

    def notice(self, link: LinkId, body: bytes) -> None:
        raise WireError(CloseReason.UNEXPECTED, "a rank accepts no notice")

    def left(self, link: LinkId) -> None:
        """Nothing was kept for it."""
