"""What the tiers have in common that look up elsewhere what they hold: peers and object stores.

    index.py    the scheduler's half: which chunks are believed to be there
    lookups.py  lookups without an answer yet: deadlines, counts, keys that were missing
    found.py    places of chunks that were found, an answer at a time
    medium.py   operations of a rank's medium that end on other threads
    options.py  bounds

A tier adds how keys are looked up, read and written.
"""

from hybridkv.tiers.remote.found import FoundPlaces
from hybridkv.tiers.remote.index import LookupClient, RemoteEntry, RemoteIndex
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
