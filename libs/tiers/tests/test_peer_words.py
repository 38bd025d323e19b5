"""Whatever a peer says is a word of the right shape, or is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_engines import fingerprint

from hybridkv.peers.wire import WireError
from hybridkv.tiers import Slot
from hybridkv.tiers.peer import words
from hybridkv.tiers.peer.options import MAX_KEYS
from hybridkv.tiers.peer.places import at_peer, peer_of, there

keys = st.lists(st.binary(min_size=1, max_size=words.MAX_KEY_BYTES), max_size=20)
extents = st.tuples(st.integers(0, (1 << 48) - 1), st.integers(1, (1 << 40)))
slots = st.lists(st.none() | st.lists(extents, min_size=1, max_size=4).map(lambda rows: Slot(tuple(rows))), max_size=9)


@given(keys)
def test_keys_come_out_as_they_went_in(keys: list[bytes]) -> None:
    assert words.unpack_keys(*words.pack_keys(keys)) == keys


@given(slots)
def test_places_come_out_as_they_went_in(slots: list[Slot | None]) -> None:
    word = words.decode(words.encode(words.found(slots, 5.0)))
    assert isinstance(word, words.FindReply) and words.slots_of(word) == tuple(slots)


@given(st.integers(0, 255), slots)
def test_a_place_at_a_peer_names_both(peer: int, slots: list[Slot | None]) -> None:
    for slot in slots:
        if slot is not None:
            assert (peer_of(at_peer(peer, slot)), there(at_peer(peer, slot))) == (peer, slot)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_word_or_refused(body: bytes) -> None:
    with contextlib.suppress(WireError):
        words.decode(body)
    with contextlib.suppress(WireError):
        words.decode_about(body)


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80), st.floats())
def test_any_columns_are_an_answer_or_refused(counts: bytes, offsets: bytes, sizes: bytes, lease_s: float) -> None:
    with contextlib.suppress(WireError):
        for slot in words.slots_of(words.FindReply(counts, offsets, sizes, lease_s)):
            assert slot is None or slot.num_bytes > 0
    with contextlib.suppress(WireError):
        assert all(words.unpack_keys(offsets, sizes))


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=6), st.integers(0, 3))
def test_any_numbers_are_an_answer_or_refused(numbers: list[int], place: int) -> None:
    columns = [words.pack_columns([numbers if at == place else [1] * len(numbers)]) for at in range(3)]
    with contextlib.suppress(WireError):
        for slot in words.slots_of(words.FindReply(*columns, 1.0)):
            assert slot is None or all(0 <= at < 1 << 48 and 0 < size < 1 << 48 for at, size in slot.extents)


def test_more_than_may_be_is_refused() -> None:
    many = [b"k"] * (MAX_KEYS + 1)
    with pytest.raises(WireError):
        words.unpack_keys(*words.pack_keys(many))
    with pytest.raises(WireError):
        words.unpack_keys(*words.pack_keys([b"k" * (words.MAX_KEY_BYTES + 1)]))
    with pytest.raises(WireError):
        words.decode_about(bytes(words.MAX_ABOUT_BYTES + 1))
    with pytest.raises(WireError):
        words.seals_of(words.SealsReply(b"\0\0", bytes(16)), 2)


def test_what_differs_between_two_engines_is_named() -> None:
    def about(model: str, rank: int = 0, protocol: int = 1, says_all: bool = True) -> words.About:
        found = fingerprint(model)
        return words.About(protocol, rank, found.digest(), found.encode() if says_all else b"")

    assert words.difference(about("a"), about("a")) is None
    assert words.difference(about("a"), about("a", says_all=False)) is None
    assert words.difference(about("a", rank=1), about("a", rank=0)) == ("rank", "1", "0")
    assert words.difference(about("a", protocol=2), about("b")) == ("protocol", "2", "1")
    named = words.difference(about("a"), about("b"))
    assert named is not None and named[0] == "model.name" and "a" in named[1] and "b" in named[2]
    digests = words.difference(about("a"), about("b", says_all=False))
    assert digests is not None and digests[0] == "fingerprint"
    rubbish = words.About(1, 0, b"other", b"\xff\xff")
    assert words.difference(about("a"), rubbish) is not None
