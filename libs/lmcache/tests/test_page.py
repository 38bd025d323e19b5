"""Pages: headers, checksums and layout."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.lmcache.errors import LMCacheProtocolError
from hybridkv.lmcache.keys import page_identity
from hybridkv.lmcache.page import HEADER_BYTES, PageState, check, page_bytes, payload_of, seal

OWN, OTHER = page_identity(b"prefix", 0, 0), page_identity(b"prefix", 0, 1)


def _sealed(payload: bytes, identity: bytes = OWN) -> bytearray:
    page = bytearray(page_bytes(len(payload)))
    payload_of(memoryview(page), len(payload))[:] = payload
    seal(memoryview(page), identity, len(payload))
    return page


def test_a_sealed_page_is_valid_for_its_identity_alone() -> None:
    page = memoryview(_sealed(b"x" * 100))
    assert check(page, OWN, 100) is PageState.GOOD
    assert check(page, OTHER, 100) is PageState.FOREIGN
    assert check(page, OWN, 99) is PageState.FOREIGN


def test_an_unsealed_or_cleared_page_is_absent() -> None:
    page = _sealed(b"x" * 100)
    page[:HEADER_BYTES] = bytes(HEADER_BYTES)
    assert check(memoryview(page), OWN, 100) is PageState.ABSENT
    assert check(memoryview(bytearray(page_bytes(100))), OWN, 100) is PageState.ABSENT


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_changed_bit_of_header_or_payload_is_found(payload: bytes, data: st.DataObject) -> None:
    page = _sealed(payload)
    at = data.draw(st.integers(0, HEADER_BYTES + len(payload) - 1))
    page[at] ^= 1 << data.draw(st.integers(0, 7))
    assert check(memoryview(page), OWN, len(payload)) is PageState.CORRUPT


def test_bytes_after_the_payload_do_not_count() -> None:
    page = _sealed(b"x" * 100)
    page[-1] ^= 1
    assert check(memoryview(page), OWN, 100) is PageState.GOOD


@given(st.binary(min_size=HEADER_BYTES, max_size=200))
def test_unsealed_bytes_are_never_a_valid_page(page: bytes) -> None:
    assert check(memoryview(page), OWN, 1) in {PageState.ABSENT, PageState.CORRUPT}


def test_a_page_has_the_documented_format() -> None:
    page = _sealed(b"abc", b"0123456789abcdef")
    assert len(page) == 128
    assert page[:32] == b"HKVPAGE1" + (3).to_bytes(8, "little") + b"0123456789abcdef"
    assert page[32:48].hex() == "855ea4cbe1b9c25f48ab135d51e67388"
    assert page[48:64] == bytes(16)
    assert page[64:67] == b"abc"


def test_an_identity_has_the_documented_format() -> None:
    said = b"\x06\0prefix" + b"\x02\0\0\0" + b"\x07" + bytes(7)
    digest = hashlib.blake2b(said, digest_size=16, person=b"hybridkv page 1").digest()
    assert page_identity(b"prefix", 2, 7) == digest
    assert len({page_identity(d, g, b) for d in (b"a", b"ab") for g in (0, 1) for b in (0, 1)}) == 8


def test_content_that_does_not_fit_a_page_is_a_protocol_error() -> None:
    page = memoryview(bytearray(128))
    with pytest.raises(LMCacheProtocolError):
        seal(page, OWN, 65)
    with pytest.raises(LMCacheProtocolError):
        seal(page, b"short", 1)
    with pytest.raises(LMCacheProtocolError):
        page_bytes(0)
