"""The life of a key, written once: what every index of this library is made of.

A `KeyLedger` knows which keys a tier holds and what may be done to them now. Where bytes lie is a `Space`'s, which key
goes first an `EvictionOrder`'s; both are small enough to be written anew for another tier or another policy.
"""

from hybridkv.tiers.ledger.ledger import KeyLedger
from hybridkv.tiers.ledger.order import EvictionOrder, LeastRecentlyUsed
from hybridkv.tiers.ledger.states import Entry, KeyState, Space, Witness

__all__ = [
    "Entry",
    "EvictionOrder",
    "KeyLedger",
    "KeyState",
    "LeastRecentlyUsed",
    "Space",
    "Witness",
]
