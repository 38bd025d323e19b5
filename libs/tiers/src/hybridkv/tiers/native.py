"""C++ classes of `hybridkv-native`: checksums of memory, ledgers of the RAM and disk tiers, I/O queue of the disk tier.

Raises:
    ImportError: `hybridkv-native` is missing, or too old.
"""

from __future__ import annotations

try:
    from hybridkv.native import GranuleLedger, MemoryCopier, RecordLedger, RecordQueue
except ImportError as error:
    raise ImportError(
        f"hybridkv.tiers needs hybridkv-native>=0.1,<0.2, which cannot be imported ({error}); "
        "hint: pip install 'hybridkv-native>=0.1,<0.2'"
    ) from error

__all__ = ["GranuleLedger", "MemoryCopier", "RecordLedger", "RecordQueue"]
