"""Shared parts of remote tiers: peers and object stores.

    index.py    the scheduler's index of found and stored chunks
    ledger.py   states, pins and LRU order of the chunks that were read or stored
    lookups.py  lookup tracker: open lookups, deadlines, counts, missing keys
    found.py    places of found chunks, grouped by lookup result
    medium.py   base class of a rank's medium; operations end on other threads
    options.py  options

Each remote tier adds its own lookup client, reads and writes.
"""

from hybridkv.tiers.remote.found import FoundPlaces
from hybridkv.tiers.remote.index import LookupClient, RemoteIndex
from hybridkv.tiers.remote.ledger import RemoteEntry
from hybridkv.tiers.remote.lookups import LookupTracker
from hybridkv.tiers.remote.medium import RemoteMedium
from hybridkv.tiers.remote.options import RemoteOptions

__all__ = [
    "FoundPlaces",
    "LookupClient",
    "LookupTracker",
    "RemoteEntry",
    "RemoteIndex",
    "RemoteMedium",
    "RemoteOptions",
]
