"""Codec of each server version. An unknown version is refused."""

from __future__ import annotations

from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.wire.codec import Codec
from hybridkv.lmcache.wire.v0_5_6 import CODEC_0_5_6
from hybridkv.lmcache.wire.v0_5_7rc2 import CODEC_0_5_7RC2

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
