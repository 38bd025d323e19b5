"""Moves bytes. Knows runs of bytes, not groups."""

from hybridkv.transfer.cpu import CpuCopyEngine
from hybridkv.transfer.engine import CopyEngine, CopyResult, Hook, JobId, RecordDigests, RunsSource
from hybridkv.transfer.errors import CopyEngineError, RunsError, TransferError
from hybridkv.transfer.inline import InlineCopyEngine
from hybridkv.transfer.native import native_lowering
from hybridkv.transfer.runs import CopyRuns, Extent, zip_extents

__all__ = [
    "CopyEngine",
    "CopyEngineError",
    "CopyResult",
    "CopyRuns",
    "CpuCopyEngine",
    "Extent",
    "Hook",
    "InlineCopyEngine",
    "JobId",
    "RecordDigests",
    "RunsError",
    "RunsSource",
    "TransferError",
    "native_lowering",
    "zip_extents",
]
