import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chunks import GOLDEN, IDENTITY, SMALL
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.canonical import (
    ChunkError,
    DamagedChunkError,
    NotAChunkError,
    UnknownVersionError,
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


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 5000))
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
        (changed("version", 2), UnknownVersionError, "version: expected 1, got 2"),
        (changed("colour", "red"), NotAChunkError, "unknown field `colour`"),
        (changed("end_token", "many"), NotAChunkError, r"`\$.end_token`"),
        (changed("end_token", 3), DamagedChunkError, "tokens must be a range"),
        (changed("start_token", -1), DamagedChunkError, "tokens must be a range"),
        (changed("payload_offset", 8), DamagedChunkError, "payload_offset"),
        (changed("payload_offset", 1 << 50), DamagedChunkError, "payload_offset"),
        (changed("key", "xy"), NotAChunkError, "key: expected hexadecimal digits"),
        (changed("key", "00"), NotAChunkError, "key: expected 32 bytes, got 1"),
        (changed("payload_checksum", "00" * 16), DamagedChunkError, "payload_checksum"),
        (changed("sections", [{"num_bytes": 1, "base64": "*"}]), NotAChunkError, r"sections\[0\].base64"),
        (changed("sections", [{"num_bytes": 2, "base64": "AA=="}]), DamagedChunkError, r"sections\[0\].num_bytes"),
        (changed("sections", [{"num_bytes": 1, "base64": "AA=="}]), DamagedChunkError, "payload_checksum"),
    ],
)
def test_an_edited_dump_that_is_no_chunk_is_refused(
    change: Callable[[dict[str, Any]], None], kind: type[ChunkError], words: str
) -> None:
    fields = json.loads(dump(DATA))
    change(fields)
    with pytest.raises(kind, match=words):
        undump(json.dumps(fields))


@given(st.text(max_size=60))
def test_other_text_is_an_error_and_not_a_crash(text: str) -> None:
    with pytest.raises(NotAChunkError):
        undump(text)
