"""Exceptions of tiers: mistakes of the caller or the operator. I/O errors of a medium are values instead.

`is_shortage` separates a shortage of this process (files, memory, threads) from faults of a device or of stored bytes.
After a shortage nothing was tried, so the medium is not at fault and its chunks are still good.
"""

from __future__ import annotations

import errno
import os
from typing import Final

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK})
"""Open files of the process or the machine, memory, threads or requests of the kernel, locks."""
_NO_THREAD: Final = ("can't start new thread", os.strerror(errno.EAGAIN))
"""Messages of Python and of a C++ library if the system gives no thread."""


class TierError(Exception):
    """Base of the exceptions of `hybridkv.tiers`."""


class TierProtocolError(TierError, RuntimeError):
    """A bug of the caller: a call that does not fit the state of a key, or a slot outside the tier."""


class TierConfigurationError(TierError, ValueError):
    """A value of the configuration that a tier cannot work with.

    Args:
        field: the parameter.
        expected: description of a valid value.
        got: the given value.
        hint: what to try next.
    """

    def __init__(self, field: str, expected: str, got: object, hint: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.hint = hint
        text = f"{field}: expected {expected}, got {got!r}"
        super().__init__(f"{text}\nhint: {hint}" if hint else text)


def is_shortage(error: BaseException) -> bool:
    """True if the error is a shortage of this process, which may pass."""
    if isinstance(error, OSError):
        return error.errno in SHORTAGES
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _NO_THREAD)
    return isinstance(error, MemoryError)
