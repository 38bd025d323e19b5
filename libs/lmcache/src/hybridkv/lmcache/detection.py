"""Detects the version and settings of a server over HTTP. The connection probes the ZMQ side later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.http import HttpAddress, HttpError, get_json
from hybridkv.lmcache.wire import Codec, codec_of

MAX_NAME_CHARS = 200
GetJson = Callable[[HttpAddress, str, float], Any]


class ServerFacts(msgspec.Struct, frozen=True):
    """Version and settings of one server process.

    Args:
        version: version of LMCache.
        separate_groups: True if windows and states are stored in separate objects, with their own lookup rules.
        null_block: block id of the null block.
        keeps_whole_windows: True if the server stores every block of a window group, not only the blocks at the end of
            each chunk.
        hash_algorithm: hash algorithm of object names.
    """

    version: str
    separate_groups: bool
    null_block: int
    keeps_whole_windows: bool
    hash_algorithm: str

    @property
    def codec(self) -> Codec:
        return codec_of(self.version)


class _Mp(msgspec.Struct):
    instance_id: str
    chunk_size: int
    separate_object_groups: bool
    null_block_id: int = 0
    transport: str = "zmq"
    engine_type: str = "default"
    hash_algorithm: str = "blake3"


class _Config(msgspec.Struct):
    mp: _Mp


def detect(address: HttpAddress, timeout_s: float, get: GetJson = get_json) -> ServerFacts:
    """Detects the facts of the server at an address.

    Raises:
        HttpError: no answer, or not an answer of an LMCache server.
        LMCacheConfigurationError: an unsupported version or transport.
    """
    version = get(address, "/lmc_version", timeout_s)
    if not isinstance(version, str) or len(version) > MAX_NAME_CHARS:
        raise HttpError("GET /lmc_version: not a version")
    codec_of(version)
    try:
        mp = msgspec.convert(get(address, "/config", timeout_s), _Config).mp
    except msgspec.ValidationError as error:
        raise HttpError(f"GET /config: {error}") from None
    if not 0 < mp.chunk_size < 1 << 32 or not 0 <= mp.null_block_id < 1 << 31 or len(mp.instance_id) > MAX_NAME_CHARS:
        raise HttpError("GET /config: values out of range")
    if mp.transport != "zmq":
        raise LMCacheConfigurationError(
            "url", "a server that listens with zmq", mp.transport, "start it without --transport"
        )
    return ServerFacts(
        version=version,
        separate_groups=mp.separate_object_groups,
        null_block=mp.null_block_id,
        # A blending engine stores every block of a window; other engines only the blocks at the end of each chunk.
        keeps_whole_windows=mp.engine_type != "default",
        hash_algorithm=mp.hash_algorithm,
    )
