"""Encoded calls have the form that FORMAT.md states, read back by a generic decoder."""

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hybridkv.lmcache.errors import LMCacheConfigurationError, LMCacheProtocolError
from hybridkv.lmcache.wire import (
    CODEC_0_5_6,
    CODEC_0_5_7RC2,
    CODECS,
    Codec,
    Key,
    MalformedError,
    MoveAnswer,
    Registration,
    RpcCall,
    TensorPlace,
    WireGroup,
    codec_of,
    read_answer,
)

LIBRARY = Path(__file__).resolve().parent.parent
KEY = Key("hybridkv-1-abc", 2, 1, b"\0\0\0\1\0\0\1\2", 0, 2, "session")
COMMON = {
    "model_name": "hybridkv-1-abc",
    "world_size": 2,
    "worker_id": 1,
    "start": 0,
    "end": 2,
    "request_id": "session",
    "cache_salt": "",
    "request_configs": None,
    "num_kv_readers": 1,
}
KEYS = {"0.5.6": {**COMMON, "token_ids": [1, 258]}, "0.5.7rc2": {**COMMON, "token_bytes": KEY.tokens}}


def _decoded(call: RpcCall[Any]) -> tuple[object, list[object]]:
    return msgspec.msgpack.decode(call.operation), [msgspec.msgpack.decode(payload) for payload in call.payloads]


@pytest.fixture(params=sorted(CODECS))
def codec(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]


def test_a_key_has_the_form_of_the_version(codec: Codec) -> None:
    key = KEYS[codec.version]
    assert _decoded(codec.store(KEY, 7, [[1, 2], [3]])) == (6, [key, 7, [[1, 2], [3]], b""])
    assert _decoded(codec.retrieve(KEY, 7, [[1], []])) == (7, [key, 7, [[1], []], b"", 0])
    assert _decoded(codec.lookup(KEY)) == (8, [key, 2])


def test_freed_locks_carry_further_ranges_where_a_server_counts_them() -> None:
    assert _decoded(CODEC_0_5_6.free_locks(KEY)) == (12, [KEYS["0.5.6"], 2])
    assert _decoded(CODEC_0_5_7RC2.free_locks(KEY)) == (12, [KEYS["0.5.7rc2"], 2, []])


def test_the_chunk_is_queried_or_negotiated() -> None:
    assert _decoded(CODEC_0_5_6.chunk_tokens(640)) == (21, [])
    assert _decoded(CODEC_0_5_7RC2.chunk_tokens(640)) == ("negotiate_chunk_size", [640])
    for codec in CODECS.values():
        assert _decoded(codec.settled_chunk_tokens()) == (21, [])


def test_calls_that_all_versions_share(codec: Codec) -> None:
    assert _decoded(codec.unregister(7)) == (2, [7])
    assert _decoded(codec.found_chunks("session")) == (9, ["session"])
    assert _decoded(codec.end_session("session")) == (13, ["session"])
    assert _decoded(codec.ping(None)) == (22, [None])
    assert _decoded(codec.noop()) == (24, [])
    assert _decoded(codec.probe())[0] == 12


def test_a_registration_has_one_int32_tensor_per_group(codec: Codec) -> None:
    place = TensorPlace("/segment", 1 << 20, 4096, 9, 128)
    groups = (
        WireGroup(0, place, 256, None, False),
        WireGroup(1, place, 64, 128, False),
        WireGroup(2, place, 256, 256, True),
    )
    operation, payloads = _decoded(codec.register(Registration(7, "model", 2, groups)))
    instance, tensors, model, world_size, engine, hints, infos = payloads
    assert (operation, instance, model, world_size, engine) == (1, 7, "model", 2, "vllm")
    assert hints == {"kv_layout": "NHD"}
    assert isinstance(tensors, list) and len(tensors) == 3
    assert tensors[0].code == 1
    assert msgspec.msgpack.decode(tensors[0].data) == {
        "type": "cpu_shm",
        "version": 1,
        "metadata": {
            "dtype": "int32",
            "shape": [9, 1, 32],
            "stride": [32, 32, 1],
            "storage_offset": 1024,
            "device_uuid": "cpu",
        },
        "shm_name": "/segment",
        "nbytes": 1 << 20,
    }
    fields = ("engine_group_id", "layer_indices", "tokens_per_block", "sw_size_tokens", "recurrent_state")
    assert isinstance(infos, list)
    assert [tuple(info[field] for field in fields) for info in infos] == [
        (0, [0], 256, -1, False),
        (1, [1], 64, 128, False),
        (2, [2], 256, 256, True),
    ]


@pytest.mark.parametrize("place", [TensorPlace("/s", 1 << 20, 2, 9, 128), TensorPlace("/s", 1 << 20, 0, 9, 126)])
def test_pages_of_partial_words_are_a_protocol_error(codec: Codec, place: TensorPlace) -> None:
    with pytest.raises(LMCacheProtocolError, match="no whole words"):
        codec.register(Registration(7, "model", 1, (WireGroup(0, place, 256, None, False),)))


def test_tokens_that_end_before_the_range_are_a_protocol_error(codec: Codec) -> None:
    with pytest.raises(LMCacheProtocolError, match="do not reach to 2"):
        codec.lookup(Key("model", 1, None, b"\0\0\0\1", 0, 2, "session"))


def test_answers_are_read_as_their_call_expects(codec: Codec) -> None:
    store = codec.store(KEY, 7, [[1]])
    assert read_answer(store, [store.operation, b"\x92\xc4\x01h\xc3"]) == MoveAnswer(True, True)
    assert read_answer(store, [store.operation, b"\x92\xc4\x01h\xc2"]) == MoveAnswer(False, True)
    assert read_answer(store, [store.operation, b"\x92\xc4\x00\xc2"]) == MoveAnswer(False, False)
    found = codec.found_chunks("session")
    assert read_answer(found, [found.operation]) is None
    assert read_answer(found, [found.operation, b"\x04"]) == 4
    for frames in (
        [store.operation, b"\x04"],
        [found.operation],
        [b"", b"\x92\xc4\x01h\xc3"],
        [],
        [store.operation] * 3,
    ):
        with pytest.raises(MalformedError):
            read_answer(store, frames)
    for value in (b"\xff", b"\xcf" + b"\xff" * 8):
        with pytest.raises(MalformedError):
            read_answer(found, [found.operation, value])


def test_an_unknown_version_is_refused_with_the_known_ones() -> None:
    assert codec_of("0.5.6") is CODEC_0_5_6
    for version in ("0.5.7", "0.5.5", "", "0.5.6 "):
        with pytest.raises(LMCacheConfigurationError, match=r"0\.5\.6 or 0\.5\.7rc2"):
            codec_of(version)


def test_lmcache_torch_and_vllm_are_not_imported() -> None:
    imported = set()
    for path in (LIBRARY / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    assert "zmq" in imported and not imported & {"lmcache", "torch", "vllm"}
