"""Object tier: one store that all engines of one model share.

index.py            the scheduler's index of chunks, built on remote/
manifests/          finds, writes and renews manifests, on a thread of its own; follows epochs
keep_alive.py       renews objects in use before the store expires them
sweeping.py         deletes least recently used objects, and leftovers of killed engines
packs.py            assigns chunks to packs
store_checks.py     lookups before stores
medium.py           each rank's medium: writes packs, reads ranges of them
format/             byte formats of packs, manifests and epoch marks; FORMAT.md
names.py            object names
store.py            opens and checks a store; obstore talks to S3, GCS and Azure
inspection.py       inspects and verifies a store without an engine
directory_store.py  a store in a local or shared directory
builder.py          builds the index or a medium from a URL and a secret
"""

from hybridkv.tiers.object.builder import SECRET_PURPOSE, StoreLocation, open_index, open_medium
from hybridkv.tiers.object.client import ClientEvent, EpochChanged, LookupAnswered, LookupFailed, StoreCounts
from hybridkv.tiers.object.index import ObjectIndex
from hybridkv.tiers.object.medium import ObjectMedium
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import ObjectSlot, PackPlace, Stored

__all__ = [
    "SECRET_PURPOSE",
    "ClientEvent",
    "EpochChanged",
    "LookupAnswered",
    "LookupFailed",
    "ObjectIndex",
    "ObjectMedium",
    "ObjectOptions",
    "ObjectSlot",
    "PackPlace",
    "StoreCounts",
    "StoreLocation",
    "Stored",
    "open_index",
    "open_medium",
]
