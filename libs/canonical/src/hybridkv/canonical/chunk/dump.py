"""A chunk as JSON that people read and edit, and back to the same bytes."""

import base64

import msgspec

from hybridkv.canonical.chunk.format import (
    CHECKSUM_BYTES,
    DIGEST_BYTES,
    MAX_KEY_BYTES,
    VERSION,
    Buffer,
    ChunkHeader,
    ChunkIdentity,
    DamagedChunkError,
    NotAChunkError,
    UnknownVersionError,
    decode,
    encode_header,
)

_FORMAT = "hybridkv chunk"


class _Section(msgspec.Struct, forbid_unknown_fields=True):
    num_bytes: int
    base64: str


class _Dump(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    fingerprint: str
    group: str
    key: str
    start_token: int
    end_token: int
    payload_offset: int
    payload_checksum: str
    sections: list[_Section]


def dump(data: Buffer) -> str:
    """The JSON of a chunk: numbers as numbers, digests in hexadecimal, content in base64.

    Raises:
        ChunkError: it cannot be decoded.
    """
    chunk = decode(data)
    header, identity = chunk.header, chunk.header.identity
    value = _Dump(
        format=_FORMAT,
        version=VERSION,
        fingerprint=identity.fingerprint.hex(),
        group=identity.group.hex(),
        key=identity.key.hex(),
        start_token=identity.start_token,
        end_token=identity.end_token,
        payload_offset=header.payload_offset,
        payload_checksum=header.payload_checksum.hex(),
        sections=[_Section(len(section), base64.b64encode(section).decode()) for section in chunk.sections],
    )
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def undump(text: str) -> bytes:
    """The bytes of the chunk that `dump` wrote.

    Raises:
        NotAChunkError: the text is no such dump; the message says where.
        UnknownVersionError: of another version.
        DamagedChunkError: its content does not have its lengths or its checksum, or a number is out of its range.
    """
    try:
        value = msgspec.json.decode(text, type=_Dump)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:  # a lone surrogate is no text to encode
        raise NotAChunkError("dump", "the JSON of a chunk", error) from error
    if value.format != _FORMAT:
        raise NotAChunkError("format", _FORMAT, value.format)
    if value.version != VERSION:
        raise UnknownVersionError("version", VERSION, value.version)
    sections = [_content(f"sections[{i}]", section) for i, section in enumerate(value.sections)]
    header = ChunkHeader(
        identity=ChunkIdentity(
            fingerprint=_digest("fingerprint", value.fingerprint, DIGEST_BYTES),
            group=_digest("group", value.group, DIGEST_BYTES),
            key=_hexadecimal("key", value.key, range(1, MAX_KEY_BYTES + 1)),
            start_token=value.start_token,
            end_token=value.end_token,
        ),
        section_bytes=tuple(len(section) for section in sections),
        payload_offset=value.payload_offset,
        payload_checksum=_digest("payload_checksum", value.payload_checksum, CHECKSUM_BYTES),
    )
    try:
        data = b"".join((encode_header(header), *sections))
    except ValueError as error:
        raise DamagedChunkError("dump", "fields in their ranges", error) from error
    decode(data)
    return data


def _digest(field: str, text: str, size: int) -> bytes:
    return _hexadecimal(field, text, range(size, size + 1))


def _hexadecimal(field: str, text: str, sizes: range) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError as error:
        raise NotAChunkError(field, "hexadecimal digits", text) from error
    if len(found) not in sizes:
        wanted = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        raise NotAChunkError(field, f"{wanted} bytes", len(found))
    return found


def _content(field: str, section: _Section) -> bytes:
    try:
        found = base64.b64decode(section.base64, validate=True)
    except ValueError as error:  # binascii.Error, and a plain one for what is not ASCII
        raise NotAChunkError(f"{field}.base64", "base64", error) from error
    if len(found) != section.num_bytes:
        raise DamagedChunkError(f"{field}.num_bytes", section.num_bytes, len(found))
    return found
