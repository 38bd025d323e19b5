"""Options of the peer tier, with defaults."""

from __future__ import annotations

from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.remote.options import RemoteOptions

MAX_KEYS = 4096
"""Limit of keys in one message. More keys need several messages."""
MAX_EXTENTS = 1 << 16
"""Limit of extents in one reply."""


class PeerOptions(RemoteOptions, frozen=True, kw_only=True):
    """Options of both sides. An invalid value raises `TierConfigurationError`."""

    # The engine that reads.
    forget_after_s: float = 30.0
    retry_s: float = 1.0
    """Delay before an unreachable peer is tried again."""
    max_hinted: int = 64
    """Limit of connections to peers that only hints name."""
    connect_wait_s: float = 0.4
    """Maximum age of a connection attempt for which a hinted lookup waits."""
    hint_backoff_s: float = 10.0
    """Seconds for which a peer gets no hinted lookup after it did not answer a hinted lookup."""

    # The engine that holds the chunks.
    lease_s: float = 60.0
    """Duration of a lease. The reader offers the chunk in the first half, and may load it until the end of the second
    half. So a load ends before its lease, and does not renew the lease; only another lookup does. A later load may find
    another digest, and fail."""
    max_leases: int = 16384
    """Limit of leases."""
    leased_share: float = 0.25
    """Limit of leased bytes, as a share of the primary tier's capacity."""

    # Bytes.
    load_timeout_s: float = 30.0
    reach_timeout_s: float = 5.0
    """Seconds that a load waits for a connection to its peer."""
    reading_bytes: int = 256 << 20
    """Limit of bytes being read by one rank. A larger chunk is read alone."""
    max_reads: int = 64
    """Limit of chunks being read by one rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_open_keys > MAX_KEYS:
            raise TierConfigurationError(
                "max_open_keys", f"at most {MAX_KEYS}, which is one message", self.max_open_keys
            )
        if self.load_timeout_s > self.lease_s / 2:
            expected = f"at most {self.lease_s / 2:g}, half of lease_s"
            hint = "a chunk may be loaded for the second half of its lease, and may be gone after it"
            raise TierConfigurationError("load_timeout_s", expected, self.load_timeout_s, hint)
        if self.leased_share > 1:
            raise TierConfigurationError("leased_share", "at most 1", self.leased_share)
