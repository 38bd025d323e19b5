"""Options of the object tier, with defaults."""

from __future__ import annotations

from hybridkv.tiers.remote.options import RemoteOptions

_BOUNDED_LIFE_S = 600.0
"""With `capacity_bytes`, a use of an object is recorded at most once in half of this time."""


class ObjectOptions(RemoteOptions, frozen=True, kw_only=True):
    """Options of both halves. An invalid value raises `TierConfigurationError`."""

    # Packs and manifests.
    pack_bytes: int = 16 << 20
    """Size limit of a pack. A larger chunk is a pack of its own."""

    # The scheduler's half.
    max_known: int = 262_144
    known_bytes: int = 1 << 44
    missing_s: float = 5.0
    found_s: float = 600.0
    """Seconds for which a chunk is offered after it was found, first read or stored; at most a quarter of
    `time_to_live_s`. Then the chunk is looked up again, because packs expire."""
    bad_s: float = 600.0
    """Seconds for which a place with wrong or missing bytes is not offered, from any manifest, and for which a bad
    version of a manifest is not read again."""
    manifest_bytes: int = 2 << 20
    """A larger manifest is neither written nor read."""
    reading_bytes: int = 8 << 20
    """Limit of the bytes of manifests that are being read at one time, if it is above `manifest_bytes`."""
    lookup_bytes: int = 256 << 10
    """Up to this size, a lookup keeps its last found manifest in memory. A larger manifest is read again."""

    # Requests.
    request_timeout_s: float = 10.0
    """Timeout of a request. A request that fails within this time is retried once."""
    connect_timeout_s: float = 2.0
    """Timeout of a connection attempt."""
    opening_timeout_s: float = 10.0
    """Seconds that the start waits for the check of the store. The check continues after that."""
    first_retry_s: float = 0.5
    """First retry delay for a store that cannot be reached or written. The delay doubles each time, up to
    `last_retry_s`."""
    last_retry_s: float = 30.0
    """Longest retry delay."""
    epoch_check_s: float = 60.0
    """Interval of the checks for a new epoch."""
    close_timeout_s: float = 5.0
    """Time for writes of manifests, and for all requests of a medium, to finish at `close`."""

    # Life of the objects.
    time_to_live_s: float | None = None
    """Seconds from the last write of an object until the store deletes it. None: the store deletes none."""
    renewals_per_s: float = 20.0
    """Limit of the requests that keep objects alive, on average. 50 times as many in a directory."""
    capacity_bytes: int | None = None
    """Limit of all objects in a directory, over all caches. The least recently used are deleted. None: no limit."""
    sweep_s: float = 60.0
    """Shortest interval of the checks of `capacity_bytes`. Slow checks are made less often."""

    # Budgets of stores.
    check_timeout_s: float = 1.0
    """Longest time that a store waits for the lookup of its chunk."""
    store_bytes_per_s: float | None = None
    """Limit of the bytes that each rank stores, on average; a burst of one second is allowed. None: no limit."""
    store_packs_per_s: float | None = None
    """Limit of new packs, on average; a burst of one second is allowed. A pack is one request of each rank. None: no
    limit."""

    @property
    def renewal_life_s(self) -> float | None:
        """Life of an object without a renewal, in seconds: the shorter of `time_to_live_s` and, with `capacity_bytes`,
        the interval after which its last use must be recorded again. None: uses are not recorded."""
        lives = [self.time_to_live_s] if self.time_to_live_s is not None else []
        lives += [_BOUNDED_LIFE_S] if self.capacity_bytes is not None else []
        return min(lives, default=None)
