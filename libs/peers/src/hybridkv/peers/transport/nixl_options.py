"""What an operator may choose about reads over NIXL, and what bounds them."""

from __future__ import annotations

import msgspec

from hybridkv.peers.errors import PeersConfigurationError


class NixlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`PeersConfigurationError` for a value that cannot work."""

    post_bytes: int = 8 << 20
    """Posted at once: what a call may block for."""
    max_posts: int = 4
    """Of one read, where posts do not block."""
    max_transfers: int = 256
    """Not released, at a time."""
    abandon_s: float = 2.0
    """What was to be cancelled, and has not ended after so long, costs the connection to its peer."""

    def __post_init__(self) -> None:
        for name in ("post_bytes", "max_posts", "max_transfers"):
            if getattr(self, name) < 1:
                raise PeersConfigurationError(name, "a number >= 1", getattr(self, name))
        if not 0 < self.abandon_s < float("inf"):
            raise PeersConfigurationError("abandon_s", "a number > 0", self.abandon_s)
