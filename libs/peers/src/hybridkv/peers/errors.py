"""What this library raises: our own mistakes. What a peer says, and what a transport meets, comes back as a value."""


class PeerError(Exception):
    """Base of everything that `hybridkv.peers` raises on purpose."""


class PeerProtocolError(PeerError, RuntimeError):
    """The caller broke the order of calls: a bug, not a broken peer."""
