"""What bounds a tier of LMCache's servers. Each has a name and a default; an operator chooses few of them."""

from __future__ import annotations

import msgspec

from hybridkv.tiers.errors import TierConfigurationError

MAX_SIZES = 16
"""Of chunks. Each is memory of its own, registered at the server by itself."""


class LMCacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`TierConfigurationError` for a value that cannot work."""

    # The scheduler's half.
    max_asked: int = 4096
    """Keys about which answers are waited for at one time."""
    max_looking: int = 128
    """Keys about which the server is asked at one time; the others wait for their turn."""
    max_known: int = 262_144
    """Keys that are believed to be there."""
    known_bytes: int = 1 << 40
    """Of these, in one rank."""
    missing_s: float = 1.0
    """For so long the server is not asked again for what it lacks."""
    given_up_s: float = 10.0
    """What was not answered so long after its deadline is waited for no more."""
    believed_s: float = 60.0
    """For so long a chunk is offered that was found or stored. A server evicts and says nothing, so it is asked again
    then."""
    bad_s: float = 30.0
    """For so long a chunk whose bytes were wrong is neither asked for nor stored. The server is to delete it meanwhile;
    what it has it does not overwrite."""

    # Bytes.
    pool_bytes: int = 256 << 20
    """Of memory that one rank shares with the server, for all sizes of chunks together. A chunk is in it while it is
    on its way. Every size has room for two chunks, however large they are."""
    max_moving: int = 64
    """Chunks of one size that are on their way at one time."""
    max_waiting: int = 4096
    """Loads and stores that wait for their turn. One more is BUSY."""
    move_timeout_s: float = 30.0
    """A load or a store that takes longer fails."""
    reach_timeout_s: float = 5.0
    """The opening of an index waits for so long for a server, to hear whether it can be used, and the first moves of a
    medium for as long."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise TierConfigurationError(name, "a number > 0", value)
