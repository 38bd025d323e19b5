"""One store for a fleet: an object store that every engine of one model reads and writes.

index.py      what is known of it: the scheduler's half
librarian.py  finds and writes manifests for it, on a thread of its own; search.py how, paths.py what of
packs.py      which chunk goes where
medium.py     writes packs and reads ranges of them: each rank's half
format/       the bytes of both; FORMAT.md
names.py      what objects are called; epochs.py which of them count
store.py      opens and proves a store; obstore speaks with S3, GCS and Azure
directory_store.py  a store in a directory
opening.py    either half from a URL and a secret
"""

from hybridkv.tiers.object.courier import Courier, Found, Moved, News, Unanswered
from hybridkv.tiers.object.index import ObjectIndex
from hybridkv.tiers.object.known import ObjectSlot, PackPlace
from hybridkv.tiers.object.medium import ObjectMedium
from hybridkv.tiers.object.opening import Depot, open_index, open_medium
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import Stored

__all__ = [
    "Courier",
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
