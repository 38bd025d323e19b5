"""Limits on the memory and time that a peer can use on this side."""

from __future__ import annotations

import msgspec

from hybridkv.peers.errors import PeersConfigurationError

MIN_FRAME_BYTES = 1024
MAX_NAME_BYTES = 128
"""Maximum size of the name of one side."""


class WireLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one process for its peers. Raises `PeersConfigurationError` for an invalid value."""

    max_frame_bytes: int = 8 << 20
    """Maximum size of one message."""
    max_queued: int = 10_000
    """Maximum unsent messages of one connection. One more message closes the connection."""
    max_items: int = 65536
    """Maximum cells of one digest request, and maximum digests of one answer."""
    max_text_bytes: int = 4096
    """Maximum characters of one text. Names have their own limit, `MAX_NAME_BYTES`."""
    max_connections: int = 256
    """Maximum established connections of all listeners together; one more replaces an idle one or is refused. Outgoing
    connections, also unfinished ones, have the same limit."""
    max_handshakes: int = 32
    """Maximum strangers (connections without a Hello) of one listener. One more stranger closes the oldest stranger of
    the host with the most strangers."""
    handshake_timeout_s: float = 5.0
    """Maximum time from connecting to the proof of the secret; for an outgoing connection, to the peer's Hello."""
    heartbeat_s: float = 2.0
    """Interval of ZeroMQ's heartbeats on every connection."""
    silence_timeout_s: float = 10.0
    """A connection ends if its peer answers no heartbeat for this long."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not value > 0 or value == float("inf"):
                raise PeersConfigurationError(name, "a number > 0", value)
        if not MIN_FRAME_BYTES <= self.max_frame_bytes <= 1 << 30:
            raise PeersConfigurationError("max_frame_bytes", f"{MIN_FRAME_BYTES} to {1 << 30}", self.max_frame_bytes)
        if self.silence_timeout_s < 2 * self.heartbeat_s:
            expected = f"at least {2 * self.heartbeat_s}, twice heartbeat_s"
            hint = "an idle peer answers once per heartbeat"
            raise PeersConfigurationError("silence_timeout_s", expected, self.silence_timeout_s, hint)
