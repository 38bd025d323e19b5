"""Size and number of granules. Index and arena must compute the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.tiers.errors import TierConfigurationError

SMALLEST_GRANULE_BYTES = 4 * 1024
LARGEST_GRANULE_BYTES = 1024 * 1024


def choose_granule_bytes(chunk_sizes: Sequence[int]) -> int:
    """Granule size for chunks of these sizes (bytes, each > 0).

    Returns the largest power of two up to 1/16 of the smallest chunk, within [4 KiB, 1 MiB]. So rounding wastes less
    than 1/16 of a chunk of 64 KiB or more, and a granule is never smaller than a memory page.
    """
    if not chunk_sizes:
        raise TierConfigurationError("chunk_sizes", "at least one size", list(chunk_sizes))
    smallest = min(chunk_sizes)
    if smallest <= 0:
        raise TierConfigurationError("chunk_sizes", "sizes > 0", smallest)
    sixteenth = max(smallest // 16, 1)
    power_of_two = 1 << (sixteenth.bit_length() - 1)
    return min(max(power_of_two, SMALLEST_GRANULE_BYTES), LARGEST_GRANULE_BYTES)


def count_granules(capacity_bytes: int, granule_bytes: int) -> int:
    """Number of whole granules in `capacity_bytes`; `TierConfigurationError` if there is none, or a size is not
    positive."""
    if granule_bytes <= 0:
        raise TierConfigurationError("granule_bytes", "a number > 0", granule_bytes)
    if capacity_bytes <= 0:
        raise TierConfigurationError("capacity_bytes", "a number > 0", capacity_bytes)
    if capacity_bytes < granule_bytes:
        raise TierConfigurationError(
            "capacity_bytes",
            f"at least one granule ({granule_bytes} bytes)",
            capacity_bytes,
            hint="give the tier more memory, or choose a smaller granule_bytes",
        )
    return capacity_bytes // granule_bytes


def count_keys(num_granules: int, granule_bytes: int, smallest_bytes: int) -> int:
    """Largest number of chunks of at least `smallest_bytes`; `TierConfigurationError` if `smallest_bytes` is not
    positive."""
    if smallest_bytes <= 0:
        raise TierConfigurationError("smallest_bytes", "a number > 0", smallest_bytes)
    return max(num_granules * granule_bytes // round_up_to_granules(granule_bytes, smallest_bytes), 1)


def round_up_to_granules(granule_bytes: int, num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole granules."""
    return -(-num_bytes // granule_bytes) * granule_bytes
