"""Epochs of a cache: what was stored in an earlier one is found by nobody any more.

An epoch is an object that only one can make, so two who begin the next one at once agree.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hybridkv.tiers.object.names import epoch_name, epoch_prefix

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def current_epoch(store: ObjectStore, cache: str) -> int:
    """The last that has begun; 0 where none has."""
    import obstore

    epochs = [0]
    for page in obstore.list(store, prefix=epoch_prefix(cache)):
        for found in page:
            number = found["path"].rpartition("/")[2]
            epochs += [int(number)] if number.isdecimal() else []
    return max(epochs)


def begin_epoch(store: ObjectStore, cache: str, epoch: int) -> None:
    """Begin it, or find that somebody has."""
    import obstore
    from obstore.exceptions import AlreadyExistsError

    with suppress(AlreadyExistsError):
        obstore.put(store, epoch_name(cache, epoch), b"", mode="create", use_multipart=False)
