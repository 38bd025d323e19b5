"""Which codec speaks with a server, by the version that it says of itself. An unknown one is refused."""

from __future__ import annotations

from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.wire.codec import Codec
from hybridkv.lmcache.wire.v0_5_6 import CODEC_0_5_6
from hybridkv.lmcache.wire.v0_5_7rc2 import CODEC_0_5_7RC2

CODECS: dict[str, Codec] = {codec.version: codec for codec in (CODEC_0_5_6, CODEC_0_5_7RC2)}


def codec_of(version: str) -> Codec:
    """The codec of a server's version.

    Raises:
        LMCacheConfigurationError: there is none. Its wire has no version of its own, and what it does not understand it
            does not answer, so a codec that is nearly right would show as calls that never end.
    """
    codec = CODECS.get(version)
    if codec is None:
        raise LMCacheConfigurationError(
            "url",
            f"an LMCache server of version {' or '.join(CODECS)}",
            version,
            "start that server, or use a hybridkv that knows this one",
        )
    return codec
