"""LMCache 0.5.7rc2: packed tokens; the first client settles the chunk size; lock release takes further ranges."""

from __future__ import annotations

from typing import Any

from hybridkv.lmcache.wire.codec import Codec, Key, RpcCall, named_call


class Codec057rc2(Codec):
    version = "0.5.7rc2"
    counts_free_ranges = True
    negotiates = True

    def key_fields(self, key: Key) -> dict[str, Any]:
        return {"token_bytes": key.tokens}

    def chunk_tokens(self, alignment_tokens: int) -> RpcCall[int]:
        return named_call("negotiate_chunk_size", (alignment_tokens,), int)


CODEC_0_5_7RC2 = Codec057rc2()
