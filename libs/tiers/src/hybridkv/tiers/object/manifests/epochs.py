"""Epochs of a cache: the mark of the current one, and its number. Chunks of an earlier epoch are not found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.tiers.object.bodies import ReadMemoryLimit, read_body
from hybridkv.tiers.object.format.epoch import EPOCH_MARK_BYTES, decode_epoch, encode_epoch
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.names import epoch_name

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

# An epoch is the second in which it began, by the clock of the host that began it.
FARTHEST_AHEAD_S = 86_400
"""A mark further in the future is ignored. Clocks of hosts differ by less."""


def next_epoch(epoch: int, now_s: float) -> int:
    """Number of the epoch that begins now, after `epoch`."""
    return max(epoch + 1, int(now_s))


async def current_epoch(store: Store, seals: Seals, cache: str, now_s: float) -> int:
    """Read the mark of the current epoch. 0 if there is no valid mark.

    Raises:
        Exception: (obstore) the request failed.
    """
    name = epoch_name(cache)
    try:
        async with read_body(store, name, EPOCH_MARK_BYTES, ReadMemoryLimit(EPOCH_MARK_BYTES)) as body:
            epoch = decode_epoch(seals, name, body.data) if body.data is not None else None
    except FileNotFoundError:
        return 0
    return epoch if epoch is not None and epoch <= now_s + FARTHEST_AHEAD_S else 0


async def begin_epoch(store: Store, seals: Seals, cache: str, epoch: int) -> None:
    """Write the mark of an epoch. If two engines do this at once and the earlier epoch wins, the engine of the later
    one writes its mark again at its next check."""
    name = epoch_name(cache)
    await store.put_async(name, encode_epoch(seals, name, epoch), use_multipart=False)
