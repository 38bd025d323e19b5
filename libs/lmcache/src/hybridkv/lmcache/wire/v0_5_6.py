"""LMCache 0.5.6: tokens as a list of numbers; the chunk size is set at server start."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridkv.lmcache.wire.codec import Codec, Key, RpcCall


class Codec056(Codec):
    version = "0.5.6"

    def key_fields(self, key: Key) -> dict[str, Any]:
        return {"token_ids": np.frombuffer(key.tokens, dtype=">u4").tolist()}

    def chunk_tokens(self, alignment_tokens: int) -> RpcCall[int]:
        return self.settled_chunk_tokens()


CODEC_0_5_6 = Codec056()
