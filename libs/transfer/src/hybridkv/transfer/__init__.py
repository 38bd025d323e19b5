"""Copy engines: they move runs of bytes between registered memory. They do not handle groups, blocks or tensors."""

from hybridkv.transfer.engine import CopyEngine, CopyResult, Hook, JobId, RecordDigests, RunsSource
from hybridkv.transfer.inline import InlineCopyEngine
from hybridkv.transfer.queued import CpuCopyEngine
from hybridkv.transfer.runs import CopyEngineError, CopyRuns, Extent, Lowering, RunsError, TransferError
from hybridkv.transfer.streams import CopyDevice, InlineStreamCopyEngine, StreamCopyEngine

__all__ = [
    "CopyDevice",
    "CopyEngine",
    "CopyEngineError",
    "CopyResult",
    "CopyRuns",
    "CpuCopyEngine",
    "Extent",
    "Hook",
    "InlineCopyEngine",
    "InlineStreamCopyEngine",
    "JobId",
    "Lowering",
    "RecordDigests",
    "RunsError",
    "RunsSource",
    "StreamCopyEngine",
    "TransferError",
]
