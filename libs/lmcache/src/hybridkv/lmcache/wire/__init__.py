"""Wire format of LMCache's server, one codec per version. FORMAT.md describes every field that is sent or read."""

from hybridkv.lmcache.wire.codec import (
    CODEC_0_5_6,
    CODEC_0_5_7RC2,
    CODECS,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
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

__all__ = [
    "CODECS",
    "CODEC_0_5_6",
    "CODEC_0_5_7RC2",
    "MAX_FRAMES",
    "MAX_FRAME_BYTES",
    "Codec",
    "Key",
    "MalformedError",
    "MoveAnswer",
    "Registration",
    "RpcCall",
    "TensorPlace",
    "WireGroup",
    "codec_of",
    "read_answer",
]
