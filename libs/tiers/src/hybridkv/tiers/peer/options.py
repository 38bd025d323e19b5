"""What bounds a peer tier on both sides. Each has a name and a default; an operator chooses few of them."""

from __future__ import annotations

from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.remote.options import RemoteOptions

MAX_PEERS = 256
MAX_KEYS = 4096
"""Of one message. A longer one is several."""


class PeerOptions(RemoteOptions, frozen=True, kw_only=True):
    """`TierConfigurationError` for a value that cannot work."""

    # The reader.
    given_up_s: float = 30.0
    retry_s: float = 1.0
    """A peer that could not be reached is left alone for so long."""

    # The holder.
    lease_s: float = 60.0
    """For so long a chunk that a peer was told of stays. A peer offers it for half of that, and may load it for as long
    again: so no load outlasts its lease, and none is renewed. One that did all the same would find another digest."""
    max_leases: int = 16384
    """Chunks that stay for peers at one time."""
    leased_share: float = 0.25
    """Of host memory, which these may take up."""

    # Bytes.
    load_timeout_s: float = 30.0
    reach_timeout_s: float = 5.0
    """A load waits for so long for a connection to its peer."""
    reading_bytes: int = 256 << 20
    """That are on their way to one rank at one time. A chunk that is larger is read by itself."""
    max_reads: int = 64
    """Chunks that are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_asked > MAX_KEYS:
            raise TierConfigurationError("max_asked", f"at most {MAX_KEYS}, which is one message", self.max_asked)
        if self.load_timeout_s > self.lease_s / 2:
            expected = f"at most {self.lease_s / 2:g}, half of lease_s"
            hint = "a chunk may be loaded for the second half of its lease, and may be gone after it"
            raise TierConfigurationError("load_timeout_s", expected, self.load_timeout_s, hint)
        if self.leased_share > 1:
            raise TierConfigurationError("leased_share", "at most 1", self.leased_share)
