"""Servers of LMCache as a slower tier: asked for by key, stored to, and read when needed.

    index.py      what a server was asked and is believed to hold: the scheduler's half
    known.py      what is believed of one chunk
    questioner.py carries the index's questions to a server
    medium.py     takes loads and stores of one rank; moving.py carries them out, shelf.py is the memory of one size
    records.py    a chunk as a server sees it: names, words, pages
    options.py    bounds
    opening.py    either half from an address

`hybridkv.lmcache` speaks with the server. A chunk is one chunk of the server, whatever its tokens are called, so a tier
works with any chunk size and any model, beside LMCache's own clients.
"""

from hybridkv.tiers.lmcache.index import LMCacheIndex
from hybridkv.tiers.lmcache.medium import LMCacheMedium
from hybridkv.tiers.lmcache.opening import Site, open_index, open_medium
from hybridkv.tiers.lmcache.options import MAX_SIZES, LMCacheOptions
from hybridkv.tiers.lmcache.questioner import Courier, Found, Lost, Questioner, Unanswered

__all__ = [
    "MAX_SIZES",
    "Courier",
    "Found",
    "LMCacheIndex",
    "LMCacheMedium",
    "LMCacheOptions",
    "Lost",
    "Questioner",
    "Site",
    "Unanswered",
    "open_index",
    "open_medium",
]
