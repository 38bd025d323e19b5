"""Bounds that every remote tier has. Each has a name and a default; an operator chooses few of them."""

from __future__ import annotations

import msgspec

from hybridkv.tiers.errors import TierConfigurationError


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Base of a tier's options.

    Raises:
        TierConfigurationError: a value cannot work.
    """

    max_asked: int = 4096
    """Keys about which answers are waited for at one time."""
    max_known: int = 65_536
    """Chunks that are believed to be there."""
    known_bytes: int = 1 << 40
    """Of these, in one rank."""
    missing_s: float = 1.0
    """A key that was not found is not looked up again for so long."""
    given_up_s: float = 10.0
    """A lookup without an answer is forgotten so long after its deadline."""
    max_waiting: int = 4096
    """Loads and stores that are not over. One more is BUSY."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise TierConfigurationError(name, "a number > 0", value)
