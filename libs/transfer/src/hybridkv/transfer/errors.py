"""What `hybridkv.transfer` raises: the caller's mistakes. A copy that fails is a `CopyResult`, not an exception."""


class TransferError(Exception):
    """Base of everything that `hybridkv.transfer` raises on purpose."""


class RunsError(TransferError, ValueError):
    """Arrays or extents that describe no copy: lengths that differ, sizes that are not positive."""


class CopyEngineError(TransferError, RuntimeError):
    """The caller broke the life cycle of a copy engine: used it after `close`, or a job id twice."""
