"""Changed words between two tiers of peers are refused within bounds. For minutes, if asked for."""

from __future__ import annotations

import os

import pytest
from peer_engines import fingerprint

from hybridkv.peers.wire import WireError, pack_columns, unpack_columns
from hybridkv.tiers import Slot
from hybridkv.tiers.peer import words
from hybridkv.tiers.peer.options import MAX_KEYS
from hybridkv.tiers.peer.places import MAX_OFFSET
from kits.peers.fuzzing import Target, bounded_memory, fuzz

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
NUM_INPUTS = 1000
MEMORY_BYTES = 1 << 30

KEYS = (b"a key", b"another", b"k" * words.MAX_KEY_BYTES)
SLOTS = (Slot(((0, 4096),)), None, Slot(((8192, 1024), (65536, 3072))))
WORDS = (
    words.Find(*words.pack_keys(KEYS)),
    words.GiveUp(*words.pack_keys(KEYS)),
    words.found(SLOTS, 60.0),
    words.AskSeals(*words.pack_keys(KEYS), pack_columns([[0, 4096, 1 << 40]])),
    words.seals([(words.SEALED, bytes(16)), (words.NOTHING, bytes(16)), (words.ANOTHER, bytes(16))]),
)
ABOUT = words.About(words.PROTOCOL, 0, fingerprint().digest(), fingerprint().encode())


def _word(data: bytes) -> None:
    word = words.decode(data)
    if isinstance(word, words.FindReply):
        for slot in words.slots_of(word):
            assert slot is None or all(0 <= at <= MAX_OFFSET and 0 < size <= MAX_OFFSET for at, size in slot.extents)
        assert 0 <= word.lease_s < 1e9
    elif isinstance(word, words.SealsReply):
        for state, digest in words.seals_of(word, 3):
            assert 0 <= state < 256 and len(digest) == words.DIGEST_BYTES
    else:
        keys = words.unpack_keys(word.keys, word.ends)
        assert len(keys) <= MAX_KEYS and all(0 < len(key) <= words.MAX_KEY_BYTES for key in keys)
        if isinstance(word, words.AskSeals):
            unpack_columns(word.offsets, 1, MAX_KEYS)


def _about(data: bytes) -> None:
    about = words.decode_about(data)
    for ours, theirs in ((ABOUT, about), (about, ABOUT)):
        differs = words.difference(ours, theirs)
        assert differs is None or all(isinstance(each, str) for each in differs)


TARGETS = (
    Target("words", tuple(map(words.encode, WORDS)), _word, (WireError,)),
    Target(
        "about",
        tuple(map(words.encode_about, (ABOUT, words.About(words.PROTOCOL, -1, b"another namespace", b"rubbish")))),
        _about,
        (WireError,),
    ),
)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_changed_bytes_are_refused_within_bounds(target: Target) -> None:
    with bounded_memory(MEMORY_BYTES):
        assert fuzz(target, SEED, NUM_INPUTS, SECONDS / len(TARGETS)) >= NUM_INPUTS
