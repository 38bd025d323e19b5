"""Mutated messages between two peer tiers are refused within bounds. `FUZZ_SECONDS` extends the run."""

from __future__ import annotations

import os

import pytest
from peer_engines import fingerprint

from hybridkv.peers.wire import WireError, pack_columns, unpack_columns
from hybridkv.tiers import Slot
from hybridkv.tiers.peer import messages
from hybridkv.tiers.peer.options import MAX_KEYS
from hybridkv.tiers.peer.places import MAX_OFFSET
from kits.peers.fuzzing import Target, bounded_memory, fuzz

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
NUM_INPUTS = 1000
MEMORY_BYTES = 1 << 30

KEYS = (b"a key", b"another", b"k" * messages.MAX_KEY_BYTES)
SLOTS = (Slot(((0, 4096),)), None, Slot(((8192, 1024), (65536, 3072))))
MESSAGES = (
    messages.Find(*messages.pack_keys(KEYS)),
    messages.EndLeases(*messages.pack_keys(KEYS)),
    messages.find_reply(SLOTS, 60.0),
    messages.SealsRequest(*messages.pack_keys(KEYS), pack_columns([[0, 4096, 1 << 40]])),
    messages.seals_reply(
        [(messages.SEALED, bytes(16)), (messages.NOT_SEALED, bytes(16)), (messages.OTHER_KEY, bytes(16))]
    ),
)
DESCRIPTION = messages.PeerDescription(messages.PROTOCOL, 0, fingerprint().digest(), fingerprint().encode())


def _message(data: bytes) -> None:
    message = messages.decode(data)
    if isinstance(message, messages.FindReply):
        for slot in messages.slots_of(message):
            assert slot is None or all(0 <= at <= MAX_OFFSET and 0 < size <= MAX_OFFSET for at, size in slot.extents)
        assert 0 <= message.lease_s < 1e9
    elif isinstance(message, messages.SealsReply):
        for state, digest in messages.seals_of(message, 3):
            assert 0 <= state < 256 and len(digest) == messages.DIGEST_BYTES
    else:
        keys = messages.unpack_keys(message.keys, message.ends)
        assert len(keys) <= MAX_KEYS and all(0 < len(key) <= messages.MAX_KEY_BYTES for key in keys)
        if isinstance(message, messages.SealsRequest):
            unpack_columns(message.offsets, 1, MAX_KEYS)


def _description(data: bytes) -> None:
    description = messages.decode_description(data)
    for ours, theirs in ((DESCRIPTION, description), (description, DESCRIPTION)):
        differs = messages.difference(ours, theirs)
        assert differs is None or all(isinstance(each, str) for each in differs)


TARGETS = (
    Target("messages", tuple(map(messages.encode, MESSAGES)), _message, (WireError,)),
    Target(
        "description",
        tuple(
            map(
                messages.encode_description,
                (DESCRIPTION, messages.PeerDescription(messages.PROTOCOL, -1, b"another namespace", b"rubbish")),
            )
        ),
        _description,
        (WireError,),
    ),
)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_mutated_messages_are_refused_within_bounds(target: Target) -> None:
    with bounded_memory(MEMORY_BYTES):
        assert fuzz(target, SEED, NUM_INPUTS, SECONDS / len(TARGETS)) >= NUM_INPUTS
