import re
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from chunks import ALIGNMENTS, BLOCKS, GOLDEN, IDENTITY, ODD, OLD, SMALL
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from hybridkv.canonical import (
    PAGE_ALIGN_BYTES,
    ChunkError,
    ChunkIdentity,
    DamagedChunkError,
    NotAChunkError,
    TruncatedChunkError,
    UnknownVersionError,
    WrongChunkError,
    decode,
    decode_header,
    dump,
    encode,
    encode_header,
    header_for,
)
from hybridkv.canonical.chunk.format import MAGIC, MAX_ALIGN_BYTES, MAX_KEY_BYTES, MAX_SECTIONS

HERE = Path(__file__).resolve().parent
DATA = encode(IDENTITY, SMALL)
AFTER = b"after".ljust(16, b"\0")
every_golden = pytest.mark.parametrize("name", GOLDEN)

DIGESTS = st.binary(min_size=32, max_size=32)
IDENTITIES = st.builds(
    lambda start, tokens, **digests: ChunkIdentity(start_token=start, end_token=start + tokens, **digests),
    start=st.integers(0, 2**62),
    tokens=st.integers(1, 2**61),
    fingerprint=DIGESTS,
    group=DIGESTS,
    key=st.binary(min_size=1, max_size=MAX_KEY_BYTES),
)


def lengths_at(data: bytes) -> int:
    """Where a chunk's section lengths begin."""
    return 120 + -(-int.from_bytes(data[10:12], "little") // 8) * 8


def resealed(data: bytes, at: int, value: bytes) -> bytes:
    """A chunk of no padding with a field of its header changed by somebody who knows how to checksum."""
    end = lengths_at(data) + 8 * int.from_bytes(data[12:16], "little")
    body = data[:at] + value + data[at + len(value) : end]
    return body + xxh3_128(body).digest() + data[end + 16 :]


@every_golden
def test_a_chunk_has_the_same_bytes_in_every_process_and_release(name: str) -> None:
    identity, sections, align_bytes = GOLDEN[name]
    assert encode(identity, sections, align_bytes) == (HERE / "golden" / f"{name}.bin").read_bytes()


@every_golden
def test_every_field_lies_where_the_format_says(name: str) -> None:
    identity, sections, _ = GOLDEN[name]
    data = (HERE / "golden" / f"{name}.bin").read_bytes()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", (HERE.parent / "FORMAT.md").read_text(), flags=re.MULTILINE)
    fields = {field: data[int(at) : int(at) + int(size)] for at, size, field in rows}
    numbers = {field: int.from_bytes(value, "little") for field, value in fields.items()}
    offset, count = numbers["payload_offset"], len(sections)
    assert fields["magic"].hex(" ") in (HERE.parent / "FORMAT.md").read_text()
    assert (numbers["version"], numbers["key_bytes"], numbers["section_count"]) == (3, len(identity.key), count)
    assert (numbers["start_token"], numbers["end_token"]) == (identity.start_token, identity.end_token)
    assert (fields["fingerprint"], fields["group"]) == (identity.fingerprint, identity.group)
    lengths = lengths_at(data)
    assert data[120:lengths] == identity.key + bytes(lengths - 120 - len(identity.key))
    assert fields["payload_checksum"] == xxh3_128(b"".join(sections)).digest()
    end = lengths + 8 * count
    assert data[lengths:end] == b"".join(len(section).to_bytes(8, "little") for section in sections)
    assert data[end:][:16] == xxh3_128(data[:end]).digest()
    assert data[end + 16 : offset] == bytes(offset - end - 16)
    assert data[offset:] == b"".join(sections)


@given(IDENTITIES, st.lists(BLOCKS, max_size=5), ALIGNMENTS)
def test_a_chunk_is_read_back_as_it_was_written(
    identity: ChunkIdentity, sections: list[bytes], align_bytes: int
) -> None:
    data = encode(identity, sections, align_bytes)
    chunk = decode(data, fingerprint=identity.fingerprint, group=identity.group, key=identity.key)
    assert chunk.header.identity == identity
    assert [bytes(section) for section in chunk.sections] == sections
    assert chunk.header.payload_offset % align_bytes == 0
    assert chunk.header.total_bytes == len(data)
    assert decode_header(data[: chunk.header.payload_offset]) == chunk.header


def test_a_chunk_is_written_and_read_without_a_copy() -> None:
    pages = [np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(16, dtype=np.uint8)]
    header = header_for(IDENTITY, [memoryview(page) for page in pages])
    data = bytearray(encode_header(header) + b"".join(pages))
    chunk = decode(data)
    data[-1] ^= 1
    assert bytes(chunk.sections[0]) == pages[0].tobytes()
    assert chunk.sections[1][-1] == pages[1][-1] ^ 1, "a view sees what becomes of the buffer"


@pytest.mark.parametrize("name", OLD)
def test_a_chunk_of_an_older_version_is_refused_by_its_magic(name: str) -> None:
    data = (HERE / "golden" / f"{name}.bin").read_bytes()
    for read in (decode, decode_header, dump):
        with pytest.raises(NotAChunkError, match="magic: expected 89484b56500d0a0a, got 89484b56430d0a0a"):
            read(data)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (16,), (2, 4, 4)])
def test_sections_of_any_shape_are_written(shape: tuple[int, ...]) -> None:
    page = np.zeros(shape, np.int8)
    data = encode(IDENTITY, [page, AFTER])  # type: ignore[list-item]
    assert [bytes(section) for section in decode(data).sections] == [bytes(page.size), AFTER]
    assert decode_header(data) == header_for(IDENTITY, [page, AFTER])  # type: ignore[list-item]


@pytest.mark.parametrize("size", [1, 15, 17, 50])
def test_a_block_whose_pages_are_not_aligned_is_not_written(size: int) -> None:
    with pytest.raises(ValueError, match=rf"sections\[1\] has {size} bytes, which is no multiple of 16"):
        encode(IDENTITY, [AFTER, bytes(size)])


def test_every_section_begins_at_a_multiple_of_16() -> None:
    header = decode_header(encode(ODD, [bytes(16), b"", bytes(48)], PAGE_ALIGN_BYTES))
    assert header.payload_offset % PAGE_ALIGN_BYTES == 0
    assert not any(num_bytes % PAGE_ALIGN_BYTES for num_bytes in header.section_bytes)


def test_no_bytes_in_any_shape_are_a_truncated_chunk() -> None:
    with pytest.raises(TruncatedChunkError):
        decode(memoryview(np.zeros((0, 4), np.int8)))


def test_a_section_that_is_not_contiguous_is_refused() -> None:
    page = np.zeros((4, 4), np.int8)
    for section in (page.T[1:], page[:, ::2]):
        for write in (encode, header_for):
            with pytest.raises(ValueError, match=r"sections\[1\] must be contiguous"):
                write(IDENTITY, [b"", memoryview(section)])


def test_every_flipped_bit_of_a_chunk_is_noticed() -> None:
    for bit in range(8 * len(DATA)):
        damaged = bytearray(DATA)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChunkError) as error:
            decode(damaged)
        kind = NotAChunkError if bit < 64 else UnknownVersionError if bit < 80 else ChunkError
        assert isinstance(error.value, kind), bit


def test_every_truncation_of_a_chunk_is_noticed() -> None:
    for size in range(len(DATA)):
        with pytest.raises(TruncatedChunkError, match=f"got {size}"):
            decode(DATA[:size])


@given(st.binary(max_size=400))
def test_bytes_of_any_other_kind_are_an_error_and_not_a_crash(data: bytes) -> None:
    for bytes_ in (data, MAGIC + data, MAGIC + b"\3\0\x30\0" + data):
        with pytest.raises(ChunkError):
            decode(bytes_)


@given(st.integers(0, len(DATA) - 1), st.binary(min_size=1, max_size=40))
def test_a_chunk_with_other_bytes_written_over_it_is_noticed(at: int, other: bytes) -> None:
    changed = DATA[:at] + other + DATA[at + len(other) :]
    if changed != DATA:
        with pytest.raises(ChunkError):
            decode(changed)


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"PK\3\4" + DATA, NotAChunkError, "magic: expected 89484b56500d0a0a, got 504b"),
        (DATA.replace(b"\r\n", b"\n"), NotAChunkError, "magic"),
        (DATA[:8] + b"\2\0" + DATA[10:], UnknownVersionError, "version: expected 3, got 2"),
        (DATA[:-1], TruncatedChunkError, f"size_bytes: expected at least {len(DATA)}, got {len(DATA) - 1}"),
        (DATA + b"\0", DamagedChunkError, f"size_bytes: expected {len(DATA)}, got {len(DATA) + 1}"),
        (DATA[:12] + b"\xff\xff\xff\xff" + DATA[16:], DamagedChunkError, "section_count: expected at most 65536"),
        (DATA[:40] + b"\x99" + DATA[41:], DamagedChunkError, "header_checksum"),
        (DATA[:-1] + b"\x98", DamagedChunkError, "payload_checksum"),
        (DATA[:10] + b"\0\0" + DATA[12:], DamagedChunkError, "key_bytes: expected 1 to 256, got 0"),
        (DATA[:10] + b"\1\1" + DATA[12:], DamagedChunkError, "key_bytes: expected 1 to 256, got 257"),
        (resealed(encode(ODD, SMALL), 159, b"\1"), DamagedChunkError, "key_padding: expected zeros, got 000001"),
        (resealed(DATA, 16, bytes(8)), DamagedChunkError, "payload_offset 0"),
        (resealed(DATA, 16, struct.pack("<Q", 1 << 40)), DamagedChunkError, "payload_offset"),
        (resealed(DATA, 24, struct.pack("<Q", 256)), DamagedChunkError, "256 to 256"),
        (resealed(DATA, lengths_at(DATA), b"\xf0" + b"\xff" * 7), DamagedChunkError, "fit no file"),
        (resealed(DATA, lengths_at(DATA), struct.pack("<Q", 15)), DamagedChunkError, "no multiple of 16"),
        (resealed(DATA, 16, struct.pack("<Q", 257)), DamagedChunkError, "payload_offset 257 is no multiple of 16"),
    ],
)
def test_damage_is_called_by_its_name(data: bytes, kind: type[ChunkError], words: str) -> None:
    with pytest.raises(kind, match=words):
        decode(data)


def test_bytes_in_the_padding_are_damage() -> None:
    data = bytearray(encode(IDENTITY, SMALL, 512))
    data[300] = 1
    with pytest.raises(DamagedChunkError, match="padding"):
        decode(data)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"fingerprint": bytes(32)}, "fingerprint: expected 00000"),
        ({"group": bytes(32)}, "group: expected 00000"),
        ({"key": bytes(32)}, "key: expected 00000"),
        ({"tokens": (0, 128)}, r"tokens: expected \(0, 128\), got \(128, 256\)"),
    ],
)
def test_a_whole_chunk_that_is_not_the_one_asked_for_is_told_apart(asked: dict[str, bytes], words: str) -> None:
    with pytest.raises(WrongChunkError, match=words):
        decode(DATA, **asked)  # type: ignore[arg-type]
    assert decode(DATA, fingerprint=IDENTITY.fingerprint, tokens=(128, 256)).sections


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": b""}, "fingerprint must have 32 bytes"),
        ({"group": bytes(31)}, "group must have 32 bytes"),
        ({"key": b""}, "key must have 1 to 256 bytes, got 0"),
        ({"key": bytes(257)}, "key must have 1 to 256 bytes, got 257"),
        ({"start_token": -1}, "tokens must be a range"),
        ({"end_token": 128}, "tokens must be a range"),
        ({"end_token": 2**63}, "tokens must be a range"),
    ],
)
def test_an_identity_out_of_range_is_not_written(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        encode(msgspec.structs.replace(IDENTITY, **changes), SMALL)


def test_alignment_and_sections_have_bounds() -> None:
    for align_bytes in (0, -1, -16, 8, 24, MAX_ALIGN_BYTES + 16):
        with pytest.raises(ValueError, match="align_bytes"):
            encode(IDENTITY, SMALL, align_bytes)
    assert decode(encode(IDENTITY, [b""] * MAX_SECTIONS, MAX_ALIGN_BYTES)).header.section_bytes == (0,) * MAX_SECTIONS
    with pytest.raises(ValueError, match="at most 65536 sections"):
        encode(IDENTITY, [b""] * (MAX_SECTIONS + 1))
