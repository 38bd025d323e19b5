"""Options and limits of reads over NIXL."""

from __future__ import annotations

import msgspec

from hybridkv.peers.errors import PeersConfigurationError


class NixlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `NixlTransport`. Raises `PeersConfigurationError` for an invalid value."""

    post_bytes: int = 8 << 20
    """Bytes per post. A call may block until a post is complete."""
    max_posts: int = 4
    """Maximum posts in flight of one read, if posts do not block."""
    max_transfers: int = 256
    """Maximum unreleased reads."""
    abandon_s: float = 2.0
    """If a failed or cancelled read has not ended after this time, its peer is given up."""

    def __post_init__(self) -> None:
        for name in ("post_bytes", "max_posts", "max_transfers"):
            if getattr(self, name) < 1:
                raise PeersConfigurationError(name, "a number >= 1", getattr(self, name))
        if not 0 < self.abandon_s < float("inf"):
            raise PeersConfigurationError("abandon_s", "a number > 0", self.abandon_s)
