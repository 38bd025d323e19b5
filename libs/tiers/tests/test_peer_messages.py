"""Peer messages: bytes from a peer decode to a valid message or are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_engines import fingerprint

from hybridkv.peers.wire import WireError
from hybridkv.tiers import Slot
from hybridkv.tiers.peer import messages
from hybridkv.tiers.peer.options import MAX_KEYS
from hybridkv.tiers.peer.places import peer_of, to_peer_slot, to_tier_slot

keys = st.lists(st.binary(min_size=1, max_size=messages.MAX_KEY_BYTES), max_size=20)
extents = st.tuples(st.integers(0, (1 << 48) - 1), st.integers(1, (1 << 40)))
slots = st.lists(st.none() | st.lists(extents, min_size=1, max_size=4).map(lambda rows: Slot(tuple(rows))), max_size=9)


@given(keys)
def test_keys_survive_packing(keys: list[bytes]) -> None:
    assert messages.unpack_keys(*messages.pack_keys(keys)) == keys


@given(slots)
def test_slots_survive_encoding(slots: list[Slot | None]) -> None:
    message = messages.decode(messages.encode(messages.find_reply(slots, 5.0)))
    assert isinstance(message, messages.FindReply) and messages.slots_of(message) == tuple(slots)


@given(st.integers(0, 255), slots)
def test_a_tier_slot_contains_the_peer_and_its_slot(peer: int, slots: list[Slot | None]) -> None:
    for slot in slots:
        if slot is not None:
            assert (peer_of(to_tier_slot(peer, slot)), to_peer_slot(to_tier_slot(peer, slot))) == (peer, slot)


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_refused(body: bytes) -> None:
    with contextlib.suppress(WireError):
        messages.decode(body)
    with contextlib.suppress(WireError):
        messages.decode_description(body)


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80), st.floats())
def test_any_columns_decode_or_are_refused(counts: bytes, offsets: bytes, sizes: bytes, lease_s: float) -> None:
    with contextlib.suppress(WireError):
        for slot in messages.slots_of(messages.FindReply(counts, offsets, sizes, lease_s)):
            assert slot is None or slot.num_bytes > 0
    with contextlib.suppress(WireError):
        assert all(messages.unpack_keys(offsets, sizes))


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=6), st.integers(0, 3))
def test_any_numbers_decode_or_are_refused(numbers: list[int], place: int) -> None:
    columns = [messages.pack_columns([numbers if at == place else [1] * len(numbers)]) for at in range(3)]
    with contextlib.suppress(WireError):
        for slot in messages.slots_of(messages.FindReply(*columns, 1.0)):
            assert slot is None or all(0 <= at < 1 << 48 and 0 < size < 1 << 48 for at, size in slot.extents)


def test_oversized_messages_are_refused() -> None:
    many = [b"k"] * (MAX_KEYS + 1)
    with pytest.raises(WireError):
        messages.unpack_keys(*messages.pack_keys(many))
    with pytest.raises(WireError):
        messages.unpack_keys(*messages.pack_keys([b"k" * (messages.MAX_KEY_BYTES + 1)]))
    with pytest.raises(WireError):
        messages.decode_description(bytes(messages.MAX_DESCRIPTION_BYTES + 1))
    with pytest.raises(WireError):
        messages.seals_of(messages.SealsReply(b"\0\0", bytes(16)), 2)


def test_difference_names_the_first_differing_field() -> None:
    def description(
        model: str, rank: int = 0, protocol: int = 1, has_fingerprint: bool = True
    ) -> messages.PeerDescription:
        found = fingerprint(model)
        return messages.PeerDescription(protocol, rank, found.digest(), found.encode() if has_fingerprint else b"")

    assert messages.difference(description("a"), description("a")) is None
    assert messages.difference(description("a"), description("a", has_fingerprint=False)) is None
    assert messages.difference(description("a", rank=1), description("a", rank=0)) == ("rank", "1", "0")
    assert messages.difference(description("a", protocol=2), description("b")) == ("protocol", "2", "1")
    named = messages.difference(description("a"), description("b"))
    assert named is not None and named[0] == "model.name" and "a" in named[1] and "b" in named[2]
    digests = messages.difference(description("a"), description("b", has_fingerprint=False))
    assert digests is not None and digests[0] == "fingerprint"
    rubbish = messages.PeerDescription(1, 0, b"other", b"\xff\xff")
    assert messages.difference(description("a"), rubbish) is not None
