"""C++ of `hybridkv-native` that this library needs: checksums of memory, the ledgers of host memory and of the disk,
and the queue of the disk's reads and writes.

Raises:
    ImportError: it is missing, or older than this library.
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
