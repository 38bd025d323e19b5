"""Ledger: the life cycle of the keys of one tier.

A `KeyLedger` holds the keys of a tier and their states. A `Space` assigns places for the bytes, and an `EvictionPolicy`
chooses the next key to evict; another tier or policy can replace both.
"""

from hybridkv.tiers.ledger.ledger import KeyLedger
from hybridkv.tiers.ledger.policies import EvictionPolicy, LruPolicy
from hybridkv.tiers.ledger.states import Entry, KeyState, LedgerObserver, Space

__all__ = [
    "Entry",
    "EvictionPolicy",
    "KeyLedger",
    "KeyState",
    "LedgerObserver",
    "LruPolicy",
    "Space",
]
