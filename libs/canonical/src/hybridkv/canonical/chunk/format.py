"""The bytes of a stored chunk: what it is, of which cache, and whether it is whole. FORMAT.md has every field.

Encoding copies nothing: the header is made apart from the sections. Decoding gives views of what it is given. What
cannot be read back is an error that says why; a caller takes each of them for a miss. The zeros behind pages are part
of the sections: whoever lays pages out writes them (`GroupPages.padding`), and nobody here knows where they are.
"""

import struct
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_128

from hybridkv.canonical.pages import PAGE_ALIGN_BYTES

MAGIC = b"\x89HKVP\r\n\n"
"""Not text, and changed by whatever changes line ends. Versions 1 and 2 had the one of the disk tier's epochs."""
VERSION = 3
DIGEST_BYTES = 32
CHECKSUM_BYTES = 16
MAX_KEY_BYTES = 256
MAX_SECTIONS = 1 << 16
MAX_ALIGN_BYTES = 1 << 20

_FIXED = struct.Struct("<8sHHIQQQ32s32s16s")
_TOKENS_LIMIT = 1 << 63

Buffer = bytes | bytearray | memoryview


class ChunkError(ValueError):
    """A chunk that cannot be used.

    Args:
        field: what is wrong.
        expected: what would have been right.
        got: what there is.
    """

    def __init__(self, field: str, expected: object, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field = field
        self.expected = expected
        self.got = got


class TruncatedChunkError(ChunkError):
    """There are fewer bytes than the chunk has."""


class NotAChunkError(ChunkError):
    """The bytes are something else."""


class UnknownVersionError(ChunkError):
    """A release wrote it that this one cannot read."""


class DamagedChunkError(ChunkError):
    """Some bytes are not those that were written."""


class WrongChunkError(ChunkError):
    """It is whole, but not the chunk that was asked for: of another cache, group, key or token range."""


class ChunkIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a chunk is.

    Args:
        fingerprint: digest of the cache, 32 bytes.
        group: digest of the group, 32 bytes.
        key: of the chunk, 1 to `MAX_KEY_BYTES` bytes.
        start_token: first token that the chunk holds.
        end_token: the token behind its last.
    """

    fingerprint: bytes
    group: bytes
    key: bytes
    start_token: int
    end_token: int


class ChunkHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that stands before a chunk's content.

    Args:
        identity: what the chunk is.
        section_bytes: length of each section, a multiple of `PAGE_ALIGN_BYTES`; a section is one block of the group.
        payload_offset: where the first section begins; the others follow without gaps.
        payload_checksum: XXH3-128 of the sections, 16 bytes.
    """

    identity: ChunkIdentity
    section_bytes: tuple[int, ...]
    payload_offset: int
    payload_checksum: bytes

    @property
    def total_bytes(self) -> int:
        """Of the whole chunk."""
        return self.payload_offset + sum(self.section_bytes)


class ChunkFile(msgspec.Struct, frozen=True):
    """A chunk's portable form, decoded; `sections` are views of the bytes it was decoded from."""

    header: ChunkHeader
    sections: tuple[memoryview, ...]


def header_for(identity: ChunkIdentity, sections: Sequence[Buffer], align_bytes: int = 64) -> ChunkHeader:
    """The header of a chunk with these sections, each a contiguous buffer.

    Args:
        identity: what the chunk is.
        sections: its content, block after block, each page aligned within; read once, for the checksum.
        align_bytes: the payload begins at a multiple of it, for instance 4096 for direct I/O. A multiple of
            `PAGE_ALIGN_BYTES` itself.

    Raises:
        ValueError: a field of the identity, the alignment, the number of sections or the length of one is out of its
            range, or a section is not contiguous.
    """
    if not 0 < align_bytes <= MAX_ALIGN_BYTES or align_bytes % PAGE_ALIGN_BYTES:
        limits = f"a multiple of {PAGE_ALIGN_BYTES} up to {MAX_ALIGN_BYTES}"
        raise ValueError(f"align_bytes must be {limits}, got {align_bytes}")
    checksum = xxh3_128()
    views = [_bytes_of(f"sections[{i}]", section) for i, section in enumerate(sections)]
    for view in views:
        checksum.update(view)
    offset = -(-_header_bytes(len(identity.key), len(views)) // align_bytes) * align_bytes
    header = ChunkHeader(
        identity=identity,
        section_bytes=tuple(len(view) for view in views),
        payload_offset=offset,
        payload_checksum=checksum.digest(),
    )
    _check_header(header)
    return header


def encode_header(header: ChunkHeader) -> bytes:
    """The `payload_offset` bytes that stand before the sections.

    Raises:
        ValueError: a field is out of its range.
    """
    _check_header(header)
    identity = header.identity
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        len(identity.key),
        len(header.section_bytes),
        header.payload_offset,
        identity.start_token,
        identity.end_token,
        identity.fingerprint,
        identity.group,
        header.payload_checksum,
    )
    key = identity.key.ljust(_padded(len(identity.key)), b"\0")
    body = fixed + key + struct.pack(f"<{len(header.section_bytes)}Q", *header.section_bytes)
    return (body + xxh3_128(body).digest()).ljust(header.payload_offset, b"\0")


def encode(identity: ChunkIdentity, sections: Sequence[Buffer], align_bytes: int = 64) -> bytes:
    """A whole chunk in one piece. To copy nothing, write `encode_header(header_for(...))`, then the sections.

    Raises:
        ValueError: as `header_for`.
    """
    views = [_bytes_of(f"sections[{i}]", section) for i, section in enumerate(sections)]
    return b"".join((encode_header(header_for(identity, views, align_bytes)), *views))


def decode_header(data: Buffer) -> ChunkHeader:
    """The header at the beginning of `data`, which need not hold more than it.

    Raises:
        ChunkError: NotAChunkError, UnknownVersionError, TruncatedChunkError or DamagedChunkError, looked for in this
            order.
    """
    view = _bytes_of("data", data)
    if bytes(view[: len(MAGIC)]) != MAGIC[: len(view)]:
        raise NotAChunkError("magic", MAGIC.hex(), bytes(view[: len(MAGIC)]).hex())
    if len(view) >= len(MAGIC) + 2 and (version := int.from_bytes(view[8:10], "little")) != VERSION:
        raise UnknownVersionError("version", VERSION, version)
    _require_bytes(view, _FIXED.size + CHECKSUM_BYTES)
    _, _, key_bytes, count, offset, start, end, fingerprint, group, checksum = _FIXED.unpack_from(view)
    if not 0 < key_bytes <= MAX_KEY_BYTES:
        raise DamagedChunkError("key_bytes", f"1 to {MAX_KEY_BYTES}", key_bytes)
    if count > MAX_SECTIONS:
        raise DamagedChunkError("section_count", f"at most {MAX_SECTIONS}", count)
    size = _header_bytes(key_bytes, count)
    _require_bytes(view, size)
    body, written = view[: size - CHECKSUM_BYTES], bytes(view[size - CHECKSUM_BYTES : size])
    if (computed := xxh3_128(body).digest()) != written:
        raise DamagedChunkError("header_checksum", written.hex(), computed.hex())
    lengths_at = _FIXED.size + _padded(key_bytes)
    key, padding = bytes(view[_FIXED.size :][:key_bytes]), bytes(view[_FIXED.size + key_bytes : lengths_at])
    if any(padding):
        raise DamagedChunkError("key_padding", "zeros", padding.hex())
    identity = ChunkIdentity(fingerprint=fingerprint, group=group, key=key, start_token=start, end_token=end)
    lengths = struct.unpack_from(f"<{count}Q", view, lengths_at)
    header = ChunkHeader(identity=identity, section_bytes=lengths, payload_offset=offset, payload_checksum=checksum)
    try:
        _check_header(header)
    except ValueError as error:
        raise DamagedChunkError("header", "fields in their ranges", error) from error
    return header


def decode(
    data: Buffer,
    *,
    fingerprint: bytes | None = None,
    group: bytes | None = None,
    key: bytes | None = None,
    tokens: tuple[int, int] | None = None,
) -> ChunkFile:
    """A chunk and nothing behind it. Nothing is copied: the sections are views of `data`.

    Args:
        data: exactly a chunk's bytes.
        fingerprint: that the chunk must have; likewise `group`, `key` and `tokens` (start, end). None takes any.

    Raises:
        ChunkError: as `decode_header`; WrongChunkError for a whole chunk that is not the one asked for.
    """
    view = _bytes_of("data", data)
    header = decode_header(view)
    _require_bytes(view, header.total_bytes)
    if len(view) > header.total_bytes:
        raise DamagedChunkError("size_bytes", header.total_bytes, len(view))
    padding = bytes(view[_header_bytes(len(header.identity.key), len(header.section_bytes)) : header.payload_offset])
    if padding != bytes(len(padding)):
        raise DamagedChunkError("padding", "zeros", "other bytes")
    if (computed := xxh3_128(view[header.payload_offset :]).digest()) != header.payload_checksum:
        raise DamagedChunkError("payload_checksum", header.payload_checksum.hex(), computed.hex())
    identity = header.identity
    for name, wanted in (("fingerprint", fingerprint), ("group", group), ("key", key)):
        got = getattr(identity, name)
        if wanted is not None and got != wanted:
            raise WrongChunkError(name, wanted.hex(), got.hex())
    if tokens is not None and tokens != (identity.start_token, identity.end_token):
        raise WrongChunkError("tokens", tokens, (identity.start_token, identity.end_token))
    sections, at = [], header.payload_offset
    for length in header.section_bytes:
        sections.append(view[at : at + length])
        at += length
    return ChunkFile(header, tuple(sections))


def _bytes_of(name: str, buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError(f"{name} must be contiguous, got shape {view.shape} with strides {view.strides}")
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _padded(key_bytes: int) -> int:
    return -(-key_bytes // 8) * 8


def _header_bytes(key_bytes: int, section_count: int) -> int:
    return _FIXED.size + _padded(key_bytes) + 8 * section_count + CHECKSUM_BYTES


def _require_bytes(view: memoryview, size: int) -> None:
    if len(view) < size:
        raise TruncatedChunkError("size_bytes", f"at least {size}", len(view))


def _check_header(header: ChunkHeader) -> None:
    identity = header.identity
    for name in ("fingerprint", "group"):
        if len(getattr(identity, name)) != DIGEST_BYTES:
            raise ValueError(f"{name} must have {DIGEST_BYTES} bytes, got {len(getattr(identity, name))}")
    if not 0 < len(identity.key) <= MAX_KEY_BYTES:
        raise ValueError(f"key must have 1 to {MAX_KEY_BYTES} bytes, got {len(identity.key)}")
    if len(header.payload_checksum) != CHECKSUM_BYTES:
        raise ValueError(f"payload_checksum must have {CHECKSUM_BYTES} bytes, got {len(header.payload_checksum)}")
    if not 0 <= identity.start_token < identity.end_token < _TOKENS_LIMIT:
        raise ValueError(f"tokens must be a range, got {identity.start_token} to {identity.end_token}")
    if len(header.section_bytes) > MAX_SECTIONS:
        raise ValueError(f"a chunk has at most {MAX_SECTIONS} sections, got {len(header.section_bytes)}")
    if not 0 <= header.payload_offset - _header_bytes(len(identity.key), len(header.section_bytes)) < MAX_ALIGN_BYTES:
        raise ValueError(f"payload_offset {header.payload_offset} is within the header or far behind it")
    if header.payload_offset % PAGE_ALIGN_BYTES:
        raise ValueError(f"payload_offset {header.payload_offset} is no multiple of {PAGE_ALIGN_BYTES}")
    for number, num_bytes in enumerate(header.section_bytes):
        if num_bytes % PAGE_ALIGN_BYTES:
            raise ValueError(f"sections[{number}] has {num_bytes} bytes, which is no multiple of {PAGE_ALIGN_BYTES}")
    if header.total_bytes >= _TOKENS_LIMIT or min(header.section_bytes, default=0) < 0:
        raise ValueError(f"sections of {header.section_bytes} bytes fit no file")
