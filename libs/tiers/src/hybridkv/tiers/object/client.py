"""Interface of the object store's lookup client: its events and a protocol. No implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.packs import PackPlace, Stored
from hybridkv.tiers.remote import LookupClient


class LookupAnswered(NamedTuple):
    """The store's answer to a lookup."""

    request: int
    places: Mapping[Key, PackPlace]
    """Places of the keys that were found."""
    answered_s: float
    """Time of the answer, by the index's clock."""


class LookupFailed(NamedTuple):
    """A lookup failed or timed out: no answer will come."""

    request: int
    answered_s: float


class EpochChanged(NamedTuple):
    """Another engine began a new epoch: chunks found or stored before this event must not be offered."""

    answered_s: float


ClientEvent = LookupAnswered | LookupFailed | EpochChanged


class StoreCounts(NamedTuple):
    """Counts of objects of a store since the last `take_counts`.

    Args:
        duplicates: chunks that this engine stored although another engine had stored them already.
        renewed: objects in use that were written again.
        renewals_dropped: manifests in use that were not checked, because too many manifests wait.
        renewals_failed: manifests in use that could not be checked or renewed.
        swept: objects that a sweep of the directory deleted.
        sweeps_failed: objects that could not be deleted.
    """

    duplicates: int = 0
    renewed: int = 0
    renewals_dropped: int = 0
    renewals_failed: int = 0
    swept: int = 0
    sweeps_failed: int = 0


class ObjectClient(LookupClient, Protocol):
    """Lookup client of an `ObjectIndex`. The items of `events` are `ClientEvent`."""

    @property
    def namespace(self) -> str | None:
        """Name prefix of the current epoch. None until the store was reached; until then, no chunk can be stored."""
        ...

    @property
    def takes_objects(self) -> bool:
        """True after a check found that the store can be written, even if the store becomes full later. False if the
        store was full or the credentials are read-only; lookups still work."""
        ...

    def send_lookup(self, request: int, keys: Sequence[Key], until_s: float, *, is_for_store: bool = False) -> bool:
        """Start a lookup of keys in prefix order. False if it cannot be sent; then no answer comes.

        Lookups above the limit wait. Of these, lookups of requests start before lookups for a store (`is_for_store`).
        """
        ...

    def publish(self, stored: Sequence[Stored]) -> None:
        """Write manifests for these stored chunks, so that other engines find them."""
        ...

    def use(self, keys: Sequence[Key]) -> None:
        """Report a use of keys of one path, so that their objects stay alive. Called at each use."""
        ...

    def take_counts(self) -> StoreCounts:
        """Counts since the last call."""
        ...

    def retract(self, key: Key, place: PackPlace) -> None:
        """Report missing or wrong bytes. Later lookups do not return this place for a while. Manifests that list it are
        replaced after the chunk is stored again."""
        ...

    def clear(self, *, is_for_all: bool) -> None:
        """Forget all chunks. If `is_for_all`, begin a new epoch, so that no engine finds the chunks stored until now.
        If the store was not reached yet, the epoch begins when it is reached."""
        ...
