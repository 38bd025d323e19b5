"""Options that all remote tiers share, with defaults."""

from __future__ import annotations

import msgspec

from hybridkv.tiers.errors import TierConfigurationError


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of the options of a remote tier.

    Raises:
        TierConfigurationError: a value is invalid.
    """

    max_open_keys: int = 4096
    """Limit of keys in open lookups, and of remembered missing keys."""
    max_known: int = 65_536
    """Limit of chunks in the index."""
    known_bytes: int = 1 << 40
    """Limit of the bytes of all chunks in the index, on one rank."""
    missing_s: float = 1.0
    """Seconds in which a missing key is not looked up again."""
    forget_after_s: float = 10.0
    """Seconds from the deadline of an unanswered lookup until the index forgets it."""
    max_waiting: int = 4096
    """Limit of open loads and stores. One more fails with BUSY."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise TierConfigurationError(name, "a number > 0", value)
