"""One store for a fleet: an object store that every engine of one model reads and writes.

index.py      chunks that it holds: the scheduler's half, over remote/
manifest_store.py  finds and writes manifests for it, on a thread of its own; search.py how, paths.py what of
packs.py      which chunk goes where
medium.py     writes packs and reads ranges of them: each rank's half
format/       the bytes of both; FORMAT.md
names.py      what objects are called; epochs.py which of them count
store.py      opens and proves a store; obstore speaks with S3, GCS and Azure
directory_store.py  a store in a directory
builder.py    either half from a URL and a secret
"""

from hybridkv.tiers.object.builder import Depot, open_index, open_medium
from hybridkv.tiers.object.client import Found, Moved, News, Unanswered
from hybridkv.tiers.object.index import ObjectIndex
from hybridkv.tiers.object.medium import ObjectMedium
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import Stored
from hybridkv.tiers.object.places import ObjectSlot, PackPlace

__all__ = [
    "Depot",
    "Found",
    "Moved",
    "News",
    "ObjectIndex",
    "ObjectMedium",
    "ObjectOptions",
    "ObjectSlot",
    "PackPlace",
    "Stored",
    "Unanswered",
    "open_index",
    "open_medium",
]
