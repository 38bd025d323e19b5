"""Native code of hybridkv: copies with checksums (csrc/cpu, without the interpreter lock) and ledgers of keys
(csrc/ledger, with the lock).

`hybridkv.transfer` and `hybridkv.tiers` require it. Addresses are integers. Impossible addresses are refused; the
caller ensures that all others are readable, or writable, until the call returns. All other arguments are checked;
invalid ones raise an error.
"""

from hybridkv.native._cpu import (
    GranuleLedger,
    Lowering,
    MemoryCopier,
    RecordLedger,
    RecordQueue,
    copy_with_memcpy,
    expand_rows,
    has_uring,
    levels,
)

__all__ = [
    "GranuleLedger",
    "Lowering",
    "MemoryCopier",
    "RecordLedger",
    "RecordQueue",
    "copy_with_memcpy",
    "expand_rows",
    "has_uring",
    "levels",
]
