"""What an operator may choose about data connections, and what bounds them."""

from __future__ import annotations

import msgspec

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.wire import WireLimits

_LIMITS = WireLimits(max_frame_bytes=4 << 20, max_buffered_bytes=8 << 20)


class TcpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`PeersConfigurationError` for a value that cannot work."""

    host: str = "127.0.0.1"
    """Where this side listens."""
    port: int = 0
    """0: any."""
    advertised_host: str = ""
    """Where peers find it, if that is not `host`."""
    connections: int = 2
    """To one peer. What is large enough is shared out among them."""
    share_bytes: int = 8 << 20
    """A read is cut into shares of at least so much."""
    max_transfers: int = 256
    """Not released, at a time."""
    max_ranges: int = 32768
    """Of one request; longer reads are several. A peer refuses requests of more."""
    connect_timeout_s: float = 5.0
    send_timeout_s: float = 30.0
    """A peer that takes no byte of an answer for so long is left."""
    limits: WireLimits = _LIMITS
    """Of handshakes and requests; `max_connections` of either kind."""

    def __post_init__(self) -> None:
        for name in ("connections", "share_bytes", "max_transfers", "max_ranges"):
            if getattr(self, name) < 1:
                raise PeersConfigurationError(name, "a number >= 1", getattr(self, name))
        for name in ("connect_timeout_s", "send_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise PeersConfigurationError(name, "a number > 0", getattr(self, name))
        if not 0 <= self.port < 65536:
            raise PeersConfigurationError("port", "0 to 65535", self.port)
        if 32 * self.max_ranges > self.limits.max_frame_bytes:
            expected = f"at most {self.limits.max_frame_bytes // 32}, which fits into a frame"
            raise PeersConfigurationError("max_ranges", expected, self.max_ranges)
