import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chunks import ALIGNMENTS, BLOCKS, GOLDEN, IDENTITY, OLD, SMALL
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.canonical import (
    ChunkError,
    DamagedChunkError,
    NotAChunkError,
    UnknownVersionError,
    decode,
    dump,
    encode,
    undump,
)

FILES = Path(__file__).resolve().parent / "golden"
DATA = encode(IDENTITY, SMALL)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_dump_and_its_chunk_become_each_other(name: str) -> None:
    data, text = (FILES / f"{name}.bin").read_bytes(), (FILES / f"{name}.json").read_text()
    assert dump(data) == text
    assert undump(text) == data


@given(st.lists(BLOCKS, max_size=5), ALIGNMENTS)
def test_every_chunk_survives_a_dump(sections: list[bytes], align_bytes: int) -> None:
    data = encode(IDENTITY, sections, align_bytes)
    assert undump(dump(data)) == data


def test_a_damaged_chunk_is_not_dumped() -> None:
    with pytest.raises(ChunkError):
        dump(DATA[:-1])


def changed(field: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.__setitem__(field, value)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (changed("format", "zip"), NotAChunkError, "format: expected hybridkv chunk, got zip"),
        (changed("version", 2), UnknownVersionError, "version: expected 3, got 2"),
        (changed("colour", "red"), NotAChunkError, "unknown field `colour`"),
        (changed("end_token", "many"), NotAChunkError, r"`\$.end_token`"),
        (changed("end_token", 3), DamagedChunkError, "tokens must be a range"),
        (changed("start_token", -1), DamagedChunkError, "tokens must be a range"),
        (changed("payload_offset", 8), DamagedChunkError, "payload_offset"),
        (changed("payload_offset", 1 << 50), DamagedChunkError, "payload_offset"),
        (changed("key", "xy"), NotAChunkError, "key: expected hexadecimal digits"),
        (changed("key", "é"), NotAChunkError, "key: expected hexadecimal digits"),
        (changed("key", ""), NotAChunkError, "key: expected 1 to 256 bytes, got 0"),
        (changed("key", "00" * 257), NotAChunkError, "key: expected 1 to 256 bytes, got 257"),
        (changed("group", "00"), NotAChunkError, "group: expected 32 bytes, got 1"),
        (changed("end_token", 10**30), DamagedChunkError, "tokens must be a range"),
        (changed("payload_offset", 2**70), DamagedChunkError, "payload_offset"),
        (changed("payload_checksum", "00" * 16), DamagedChunkError, "payload_checksum"),
        (changed("sections", [{"num_bytes": 1, "base64": "*"}]), NotAChunkError, r"sections\[0\].base64"),
        (changed("sections", [{"num_bytes": 1, "base64": "é"}]), NotAChunkError, r"sections\[0\].base64"),
        (changed("sections", [{"num_bytes": 0, "base64": ""}] * 70000), DamagedChunkError, "at most 65536 sections"),
        (changed("sections", [{"num_bytes": 2, "base64": "AA=="}]), DamagedChunkError, r"sections\[0\].num_bytes"),
        (changed("sections", [{"num_bytes": 1, "base64": "AA=="}]), DamagedChunkError, "no multiple of 16"),
        (changed("sections", [{"num_bytes": 16, "base64": 21 * "A" + "A=="}]), DamagedChunkError, "payload_checksum"),
    ],
)
def test_an_edited_dump_that_is_no_chunk_is_refused(
    change: Callable[[dict[str, Any]], None], kind: type[ChunkError], words: str
) -> None:
    fields = json.loads(dump(DATA))
    change(fields)
    for ascii_only in (False, True):
        with pytest.raises(kind, match=words):
            undump(json.dumps(fields, ensure_ascii=ascii_only))


@pytest.mark.parametrize("name", OLD)
def test_a_dump_of_an_older_version_is_refused_by_its_version(name: str) -> None:
    with pytest.raises(UnknownVersionError, match=f"version: expected 3, got {OLD[name]}"):
        undump((FILES / f"{name}.json").read_text())


ANY_CHARACTER = st.characters(exclude_categories=())
"""Lone surrogates too, which no encoding takes."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(ANY_CHARACTER, max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["num_bytes", "base64"]), inner),
)


def require_a_chunk_or_its_error(text: str) -> None:
    try:
        data = undump(text)
    except ChunkError:
        return
    decode(data)


@given(st.data())
def test_a_dump_with_characters_changed_is_a_chunk_or_an_error_and_not_a_crash(data: st.DataObject) -> None:
    text = dump(DATA)
    at = data.draw(st.integers(0, len(text)))
    removed = data.draw(st.integers(0, 3))
    require_a_chunk_or_its_error(text[:at] + data.draw(st.text(ANY_CHARACTER, max_size=3)) + text[at + removed :])


@given(st.sampled_from(sorted(json.loads(dump(DATA)))), VALUES, st.booleans())
def test_a_dump_with_a_field_changed_is_a_chunk_or_an_error_and_not_a_crash(
    field: str, value: object, ascii_only: bool
) -> None:
    require_a_chunk_or_its_error(json.dumps(json.loads(dump(DATA)) | {field: value}, ensure_ascii=ascii_only))


@given(st.integers(0, 2), st.sampled_from(["num_bytes", "base64"]), VALUES, st.booleans())
def test_a_dump_with_a_section_changed_is_a_chunk_or_an_error_and_not_a_crash(
    index: int, field: str, value: object, ascii_only: bool
) -> None:
    fields = json.loads(dump(DATA))
    fields["sections"][index][field] = value
    require_a_chunk_or_its_error(json.dumps(fields, ensure_ascii=ascii_only))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"sections":' * 100_000, '{"key": "\\ud800"}', "\ud800"])
def test_text_that_a_parser_may_stumble_over_is_an_error(text: str) -> None:
    with pytest.raises(NotAChunkError):
        undump(text)


@given(st.text(ANY_CHARACTER, max_size=60))
def test_other_text_is_an_error_and_not_a_crash(text: str) -> None:
    with pytest.raises(NotAChunkError):
        undump(text)
