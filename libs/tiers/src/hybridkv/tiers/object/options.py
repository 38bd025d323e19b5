"""Options of the object tier, with defaults."""

from __future__ import annotations

from hybridkv.tiers.remote.options import RemoteOptions


class ObjectOptions(RemoteOptions, frozen=True, kw_only=True):
    """Options of both halves. An invalid value raises `TierConfigurationError`."""

    # Packs and manifests.
    pack_bytes: int = 16 << 20
    """Size limit of a pack. A larger chunk is a pack of its own."""
    boundary_every: int = 8
    """On average one prefix of so many is a boundary, which always has a manifest. It must be equal in all engines of a
    fleet, since it is part of the namespace."""

    # The scheduler's half.
    max_searching: int = 32
    """Concurrent searches; others wait."""
    max_probes: int = 16
    """Manifests read in one round of a search for the last boundary with a manifest."""
    max_tail_probes: int = 32
    """Manifests read after that boundary, where a path may have ended at any prefix."""
    max_requests: int = 64
    """Concurrent requests of the scheduler to the store."""
    max_known: int = 262_144
    known_bytes: int = 1 << 44
    max_nodes: int = 131_072
    """Prefixes and chunks in the prefix graph, from which manifests are built."""
    max_unpublished: int = 1024
    """Path ends without a manifest yet, because an earlier part is unknown."""
    missing_s: float = 5.0
    believed_s: float = 600.0
    """A chunk is offered for so long after it was found or stored. Then it is looked up again, since packs expire."""
    bad_s: float = 600.0
    """A place with wrong or missing bytes is not offered for so long, whichever manifest lists it."""
    manifest_bytes: int = 2 << 20
    """A larger manifest is neither written nor read."""
    reading_bytes: int = 8 << 20
    """Bytes of manifests that all lookups together hold at one time."""
    lookup_bytes: int = 256 << 10
    """A lookup keeps the last manifest it found up to this size, and reads a larger one again."""

    # Bytes.
    read_bytes: int = 16 << 20
    """Adjacent chunks are read together up to this size."""
    gap_bytes: int = 64 << 10
    """Chunks with a gap up to this size count as adjacent."""
    num_threads: int = 4
    """Concurrent pack reads and writes of one rank."""
    request_timeout_s: float = 10.0
    """Timeout of a request, which is then retried once."""
    connect_timeout_s: float = 2.0
    """Timeout of a connection attempt."""
    opening_timeout_s: float = 10.0
    """Startup waits so long for the check of the store. The check continues after that."""
    first_retry_s: float = 0.5
    """First retry delay for an unreachable store. It doubles each time,"""
    last_retry_s: float = 30.0
    """up to this."""
    epoch_check_s: float = 60.0
    """Interval of the checks for a new epoch."""
    close_timeout_s: float = 5.0
    """Time for open requests to finish at `close`."""
