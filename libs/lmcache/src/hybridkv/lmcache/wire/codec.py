"""Calls to a server of any version and decoding of its answers.

Versions of the server differ in names and numbers of fields, without a version on the wire, and a server does not
answer a call that it cannot decode. So each version has its own codec, a subclass with the differences, and an answer
of an unexpected form raises `MalformedError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from hybridkv.lmcache.errors import LMCacheConfigurationError, LMCacheProtocolError

T = TypeVar("T")

MAX_FRAME_BYTES = 64 << 10
"""Maximum size of a frame; expected answers are far smaller."""
MAX_FRAMES = 3
"""Frames of an answer: call id, operation, value. The value may be missing."""
_ENGINE = "vllm"
"""Engine name for which the server reads a tensor of three dimensions as blocks, slots, bytes."""
_SHM_EXTENSION = 1
_WORD, _WORD_BYTES = "int32", 4
"""Element type of pages. With bytes, copies of a server without a GPU take up to nine times as long."""

_encode = msgspec.msgpack.encode


class MalformedError(ValueError):
    """Invalid answer to a call. A channel returns a `CallFailure` with MALFORMED, and never raises this to callers."""


@dataclass(frozen=True, slots=True)
class Key:
    """Key of a token range. A server derives object names from the key.

    Args:
        model: cache name, shared by all clients with equal pages; without "@" and "/".
        world_size: number of ranks; each rank holds a part.
        rank: rank of the part; None for all ranks, allowed only to look up and to free locks.
        tokens: words of 32 bits, big-endian, from the start of the prefix to `end_token` at least.
        start_token: first token; a multiple of the server's chunk size.
        end_token: token after the last; a multiple of the server's chunk size.
        session: id of the request and of its locks.
    """

    model: str
    world_size: int
    rank: int | None
    tokens: bytes
    start_token: int
    end_token: int
    session: str


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Location of the pages of one group: `num_blocks` contiguous pages from `offset` of a segment."""

    segment: str
    segment_bytes: int
    offset: int
    num_blocks: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class WireGroup:
    """One group of a registration. Calls list block ids in the order of the registered groups.

    Args:
        engine_group: groups with the same number share block ids.
        place: location of the group's pages.
        tokens_per_block: tokens per page.
        window_tokens: tokens that a resume needs; None if it needs every token.
        is_recurrent: True if a page is a state; then a resume needs only the last page.
    """

    engine_group: int
    place: TensorPlace
    tokens_per_block: int
    window_tokens: int | None
    is_recurrent: bool


@dataclass(frozen=True, slots=True)
class Registration:
    """Registered memory of one rank."""

    instance: int
    model: str
    world_size: int
    groups: tuple[WireGroup, ...]


class MoveAnswer(NamedTuple):
    """Answer to a store or a retrieve."""

    is_done: bool
    is_registered: bool
    """False if the server returned an empty handle: the instance is not registered there."""


class RpcCall(NamedTuple, Generic[T]):
    """One call: its frames and the type of its answer."""

    operation: bytes
    payloads: tuple[bytes, ...]
    expected: Any
    name: str


class Codec:
    """Calls of one version. Subclasses define the differences.

    Attributes:
        version: version text of the server's `/lmc_version`.
        has_free_ranges: True if `free_lookup_locks` has a payload for further ranges.
        negotiates: True if a call settles the chunk size; else the server's configuration sets it.
    """

    version = ""
    has_free_ranges = False
    negotiates = False

    def key_fields(self, key: Key) -> dict[str, Any]:
        """Version-specific fields of a key."""
        raise NotImplementedError

    # Once per connection.

    def noop(self) -> RpcCall[str]:
        return _call("noop", 24, (), str)

    def probe(self) -> RpcCall[None]:
        """Call without effect. Only a server of this version answers, because the call depends on the key format."""
        return self.free_locks(Key("hybridkv-probe", 1, None, b"", 0, 0, "hybridkv-probe"))

    def chunk_tokens(self, alignment_tokens: int) -> RpcCall[int]:
        """The server's chunk size. A server that negotiates settles the size now, or does not answer if it cannot."""
        raise NotImplementedError

    def settled_chunk_tokens(self) -> RpcCall[int]:
        """The server's current chunk size. A server that negotiates keeps this size afterwards."""
        return _call("get_chunk_size", 21, (), int)

    def register(self, registration: Registration) -> RpcCall[None]:
        places = [_tensor(group.place) for group in registration.groups]
        groups = [_group(index, group) for index, group in enumerate(registration.groups)]
        payloads = (
            registration.instance,
            places,
            registration.model,
            registration.world_size,
            _ENGINE,
            {"kv_layout": "NHD"},
            groups,
        )
        return _call("register_kv_cache", 1, payloads, None)

    def unregister(self, instance: int) -> RpcCall[None]:
        return _call("unregister_kv_cache", 2, (instance,), None)

    def ping(self, instance: int | None) -> RpcCall[bool]:
        return _call("ping", 22, (instance,), bool)

    # For each prefix.

    def store(self, key: Key, instance: int, block_ids: Sequence[Sequence[int]]) -> RpcCall[MoveAnswer]:
        return _call("store", 6, (self._key(key), instance, block_ids, b""), MoveAnswer)

    def retrieve(self, key: Key, instance: int, block_ids: Sequence[Sequence[int]]) -> RpcCall[MoveAnswer]:
        return _call("retrieve", 7, (self._key(key), instance, block_ids, b"", 0), MoveAnswer)

    def lookup(self, key: Key) -> RpcCall[None]:
        return _call("lookup", 8, (self._key(key), key.world_size), None)

    def found_chunks(self, session: str) -> RpcCall[int | None]:
        """Result of a lookup; None while the lookup runs. Poll until the answer is a number, then stop."""
        return _call("query_prefetch_status", 9, (session,), int | None)

    def free_locks(self, key: Key) -> RpcCall[None]:
        payloads: tuple[Any, ...] = (self._key(key), key.world_size)
        return _call("free_lookup_locks", 12, (*payloads, ()) if self.has_free_ranges else payloads, None)

    def end_session(self, session: str) -> RpcCall[None]:
        return _call("end_session", 13, (session,), None)

    def _key(self, key: Key) -> dict[str, Any]:
        if len(key.tokens) % 4 or key.end_token * 4 > len(key.tokens):
            raise LMCacheProtocolError(f"{len(key.tokens)} bytes of tokens do not reach to {key.end_token}")
        return {
            "model_name": key.model,
            "world_size": key.world_size,
            "worker_id": key.rank,
            "start": key.start_token,
            "end": key.end_token,
            "request_id": key.session,
            "cache_salt": "",
            "request_configs": None,
            "num_kv_readers": 1,
            **self.key_fields(key),
        }


def read_answer(call: RpcCall[T], frames: Sequence[bytes]) -> T:
    """Decodes the value of an answer. `frames` excludes the call id.

    Raises:
        MalformedError: not a valid answer to this call.
    """
    if not 1 <= len(frames) < MAX_FRAMES or frames[0] != call.operation:
        raise MalformedError(f"{call.name}: {len(frames)} frames, or those of another call")
    if len(frames) == 1:
        if call.expected is None or call.expected == int | None:
            return None  # type: ignore[return-value]
        raise MalformedError(f"{call.name}: no value")
    if len(frames[1]) > MAX_FRAME_BYTES:
        raise MalformedError(f"{call.name}: {len(frames[1])} bytes")
    try:
        if call.expected is MoveAnswer:
            handle, is_done = msgspec.msgpack.decode(frames[1], type=tuple[bytes, bool])
            return MoveAnswer(is_done, is_done or handle != b"")  # type: ignore[return-value]
        value = msgspec.msgpack.decode(frames[1], type=call.expected)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedError(f"{call.name}: {error}") from None
    if type(value) is int and not 0 <= value < 1 << 48:
        raise MalformedError(f"{call.name}: {value} is out of range")
    return value  # type: ignore[no-any-return]


def _call(name: str, number: int | None, payloads: Sequence[Any], expected: Any) -> RpcCall[Any]:
    operation = _encode(name if number is None else number)
    return RpcCall(operation, tuple(map(_encode, payloads)), expected, name)


def named_call(name: str, payloads: Sequence[Any], expected: Any) -> RpcCall[Any]:
    """Call with a name instead of a number, as in newer versions."""
    return _call(name, None, payloads, expected)


def _tensor(place: TensorPlace) -> msgspec.msgpack.Ext:
    if place.page_bytes % _WORD_BYTES or place.offset % _WORD_BYTES:
        raise LMCacheProtocolError(f"pages of {place.page_bytes} bytes from {place.offset}: no whole words")
    page = place.page_bytes // _WORD_BYTES
    descriptor = {
        "type": "cpu_shm",
        "version": 1,
        "metadata": {
            "dtype": _WORD,
            # One slot per block, so a page can be any run of bytes.
            "shape": (place.num_blocks, 1, page),
            "stride": (page, page, 1),
            "storage_offset": place.offset // _WORD_BYTES,
            "device_uuid": "cpu",
        },
        "shm_name": place.segment,
        "nbytes": place.segment_bytes,
    }
    return msgspec.msgpack.Ext(_SHM_EXTENSION, _encode(descriptor))


def _group(index: int, group: WireGroup) -> dict[str, Any]:
    return {
        "engine_group_id": group.engine_group,
        "layer_indices": (index,),
        "tokens_per_block": group.tokens_per_block,
        "sw_size_tokens": -1 if group.window_tokens is None else group.window_tokens,
        "extra_object_group_tag": 0,
        "recurrent_state": group.is_recurrent,
    }


class Codec056(Codec):
    """LMCache 0.5.6: tokens as a list of numbers; the chunk size is set at server start."""

    version = "0.5.6"

    def key_fields(self, key: Key) -> dict[str, Any]:
        return {"token_ids": np.frombuffer(key.tokens, dtype=">u4").tolist()}

    def chunk_tokens(self, alignment_tokens: int) -> RpcCall[int]:
        return self.settled_chunk_tokens()


class Codec057rc2(Codec):
    """LMCache 0.5.7rc2: packed tokens; the first client settles the chunk size; lock release takes further ranges."""

    version = "0.5.7rc2"
    has_free_ranges = True
    negotiates = True

    def key_fields(self, key: Key) -> dict[str, Any]:
        return {"token_bytes": key.tokens}

    def chunk_tokens(self, alignment_tokens: int) -> RpcCall[int]:
        return named_call("negotiate_chunk_size", (alignment_tokens,), int)


CODEC_0_5_6 = Codec056()
CODEC_0_5_7RC2 = Codec057rc2()
CODECS: dict[str, Codec] = {codec.version: codec for codec in (CODEC_0_5_6, CODEC_0_5_7RC2)}


def codec_of(version: str) -> Codec:
    """Codec of a server's version.

    Raises:
        LMCacheConfigurationError: the version is unknown. No other codec is tried: a server does not answer calls that
            it cannot decode, so calls of a nearly correct codec would time out.
    """
    codec = CODECS.get(version)
    if codec is None:
        raise LMCacheConfigurationError(
            "url",
            f"an LMCache server of version {' or '.join(CODECS)}",
            version,
            "start a supported server, or use a hybridkv that supports this version",
        )
    return codec
