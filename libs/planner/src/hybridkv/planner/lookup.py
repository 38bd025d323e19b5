"""What a tier may answer when it is asked for a chunk, and nothing else."""

import enum


class LookupResult(enum.Enum):
    """The answer to "is this chunk stored?"."""

    HIT = "hit"
    """Stored and readable now."""
    PENDING = "pending"
    """On its way into the tier: worth asking again, not readable yet."""
    MISS = "miss"
    """Not stored."""
