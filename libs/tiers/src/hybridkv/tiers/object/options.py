"""What bounds a tier in an object store. Each has a name and a default; an operator chooses few of them."""

from __future__ import annotations

from hybridkv.tiers.remote.options import RemoteOptions


class ObjectOptions(RemoteOptions, frozen=True, kw_only=True):
    """`TierConfigurationError` for a value that cannot work."""

    # Packs and manifests.
    pack_bytes: int = 16 << 20
    """A pack is full when it has as many. One chunk may have more: then it is a pack by itself."""
    boundary_every: int = 8
    """One prefix hash of so many, by chance, has a manifest wherever it is passed. The same in all engines of a fleet:
    it is a part of the namespace."""

    # The scheduler's half.
    max_searching: int = 32
    """Prefixes that are searched at one time; the others wait for their turn."""
    max_probes: int = 16
    """Manifests that are asked for together in one round of a search for the last boundary that has one."""
    max_tail_probes: int = 32
    """The same behind that boundary, where a path may have ended anywhere."""
    max_requests: int = 64
    """To the store, of the scheduler's half at one time."""
    max_known: int = 262_144
    known_bytes: int = 1 << 44
    max_nodes: int = 131_072
    """Prefixes whose place on their path is remembered, and chunks that end there, so that a manifest can name all that
    comes before."""
    max_unpublished: int = 1024
    """Ends of paths whose manifests wait for what comes before them."""
    missing_s: float = 5.0
    believed_s: float = 600.0
    """For so long a chunk is offered that was found or stored. It is asked for again then, since packs expire."""
    bad_s: float = 600.0
    """For so long a place is believed by nobody here whose bytes were wrong or gone, whatever manifest names it."""
    manifest_bytes: int = 2 << 20
    """A larger manifest is neither written nor read."""
    reading_bytes: int = 8 << 20
    """Of manifests, that all lookups together read at one time."""
    lookup_bytes: int = 256 << 10
    """A lookup keeps the last manifest that it found, if that has no more bytes; a larger one it reads again."""

    # Bytes.
    read_bytes: int = 16 << 20
    """Neighbours in a pack are read together up to so many."""
    gap_bytes: int = 64 << 10
    """Two chunks are neighbours with no more than this between them."""
    num_threads: int = 4
    """Packs that are read or written by one rank at one time."""
    request_timeout_s: float = 10.0
    """A request to the store that takes longer has failed, and is made once more."""
    connect_timeout_s: float = 2.0
    """The same for reaching it."""
    opening_timeout_s: float = 10.0
    """A start waits no longer for the proof of what a store can do; it goes on behind it."""
    first_retry_s: float = 0.5
    """A store that was not reached is tried again after so long, and twice as long each time,"""
    last_retry_s: float = 30.0
    """up to this."""
    epoch_check_s: float = 60.0
    """So often it is looked whether somebody has begun another epoch."""
    close_timeout_s: float = 5.0
    """What is on its way at the end has so long."""
