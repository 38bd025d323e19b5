"""The size of everything that a peer can make this side hold, and for how long. Each has a name and a default."""

from __future__ import annotations

import msgspec

from hybridkv.peers.errors import PeersConfigurationError

MIN_FRAME_BYTES = 1024
MAX_NAME_BYTES = 128
"""Of the name of one side."""


class WireLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one process grants its peers. `PeersConfigurationError` for a value that cannot work."""

    max_frame_bytes: int = 8 << 20
    """Of one message."""
    max_queued: int = 10_000
    """Messages that wait to be sent on one connection. One more ends it."""
    max_items: int = 65536
    """Of one list, and of one set of columns."""
    max_text_bytes: int = 4096
    """Of one text. Of a name: `MAX_NAME_BYTES`, whatever is written here."""
    max_connections: int = 256
    """That are established, of one listener, and as many that this process opened."""
    max_handshakes: int = 32
    """In flight at one listener. One more ends the oldest of the host that has most."""
    handshake_timeout_s: float = 5.0
    """From the connection to the proof, and where it was opened here to the other side's Hello."""
    heartbeat_s: float = 2.0
    """ZeroMQ's, on every connection."""
    silence_timeout_s: float = 10.0
    """A connection whose other side does not answer heartbeats for so long ends."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not value > 0 or value == float("inf"):
                raise PeersConfigurationError(name, "a number > 0", value)
        if not MIN_FRAME_BYTES <= self.max_frame_bytes <= 1 << 30:
            raise PeersConfigurationError("max_frame_bytes", f"{MIN_FRAME_BYTES} to {1 << 30}", self.max_frame_bytes)
        if self.silence_timeout_s < 2 * self.heartbeat_s:
            expected = f"at least {2 * self.heartbeat_s}, twice heartbeat_s"
            hint = "a peer that has nothing to say is heard once a heartbeat"
            raise PeersConfigurationError("silence_timeout_s", expected, self.silence_timeout_s, hint)
