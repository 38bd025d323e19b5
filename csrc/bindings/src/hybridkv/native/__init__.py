"""The C++ of csrc/cpu: moves bytes and takes their checksums at the speed of memory, without the interpreter lock. And
that of csrc/ledger: which keys a tier holds, with it.

`hybridkv.transfer` and `hybridkv.tiers` cannot be imported without it. Addresses are integers. A number that no memory
can have is refused; the caller makes sure that all others are readable, or writable, and stay so until a call returns.
Every other argument is checked: a call that does not fit raises an error.
"""

from hybridkv.native._cpu import (
    GranuleLedger,
    Lowering,
    MemoryCopier,
    RecordLedger,
    RecordQueue,
    copy_with_memcpy,
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
    "has_uring",
    "levels",
]
