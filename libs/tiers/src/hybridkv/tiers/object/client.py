"""Events and counts of the object store's lookup client, `ManifestStore`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.packs import PackPlace


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
