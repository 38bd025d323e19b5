"""C++ of `hybridkv-native` that this library needs: copies of runs, and the runs of a whole job.

Raises:
    ImportError: it is missing, or older than this library.
"""

from __future__ import annotations

from typing import Protocol

from hybridkv.transfer.runs import CopyRuns, Integers

try:
    from hybridkv.native import Lowering, MemoryCopier
except ImportError as error:
    raise ImportError(
        f"hybridkv.transfer needs hybridkv-native>=0.1,<0.2, which cannot be imported ({error}); "
        "hint: pip install 'hybridkv-native>=0.1,<0.2'"
    ) from error

__all__ = ["Copier", "Lowering", "MemoryCopier"]


class Copier(Protocol):
    """Copies each run. The digest of each record, 16 bytes, if `record_ends` asks for them and it takes any."""

    def __call__(self, runs: CopyRuns, record_ends: Integers | None = None) -> list[bytes] | None: ...
