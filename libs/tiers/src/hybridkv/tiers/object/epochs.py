"""Epochs of a cache: no engine finds what was stored in an earlier epoch.

An epoch is the second in which it began, by the clock of the host that began it. So a mark can be checked against the
reader's own clock, and one from far in the future is not believed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.tiers.object.bodies import Room, read_body
from hybridkv.tiers.object.format.epoch import EPOCH_MARK_BYTES, decode_epoch, encode_epoch
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.names import epoch_name

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

FARTHEST_AHEAD_S = 86_400
"""A mark that lies further in the future is not believed. Clocks of hosts differ by less."""


def next_epoch(epoch: int, now_s: float) -> int:
    """The epoch that begins now, after this one."""
    return max(epoch + 1, int(now_s))


async def current_epoch(store: Store, seals: Seals, cache: str, now_s: float) -> int:
    """The epoch that the store's mark names. 0 where there is no mark, or none to be believed.

    Raises:
        Exception: of obstore, where the store gave no answer.
    """
    name = epoch_name(cache)
    try:
        async with read_body(store, name, EPOCH_MARK_BYTES, Room(EPOCH_MARK_BYTES)) as body:
            epoch = decode_epoch(seals, name, body.data) if body.data is not None else None
    except FileNotFoundError:
        return 0
    return epoch if epoch is not None and epoch <= now_s + FARTHEST_AHEAD_S else 0


async def begin_epoch(store: Store, seals: Seals, cache: str, epoch: int) -> None:
    """Mark an epoch as current. Of two engines that do so at once, the one with the later epoch finds an earlier mark
    at its next look, and writes its own again."""
    name = epoch_name(cache)
    await store.put_async(name, encode_epoch(seals, name, epoch), use_multipart=False)
