"""Codec of each server version. An unknown version is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.wire.codec import Codec, Key, RpcCall, named_call


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
    counts_free_ranges = True
    negotiates = True

    def key_fields(self, key: Key) -> dict[str, Any]:
        return {"token_bytes": key.tokens}

    def chunk_tokens(self, alignment_tokens: int) -> RpcCall[int]:
        return named_call("negotiate_chunk_size", (alignment_tokens,), int)


CODEC_0_5_6 = Codec056()
CODEC_0_5_7RC2 = Codec057rc2()
CODECS: dict[str, Codec] = {codec.version: codec for codec in (CODEC_0_5_6, CODEC_0_5_7RC2)}


def codec_of(version: str) -> Codec:
    """The codec of a server's version.

    Raises:
        LMCacheConfigurationError: unknown version. The wire has no version and a server does not answer calls that it
            cannot decode, so with a nearly correct codec calls would time out.
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
