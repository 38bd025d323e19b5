"""Exceptions of tiers: mistakes of the caller or the operator. I/O errors of a medium are `Failure` values instead.

`is_shortage` separates a shortage of this process or machine (open files, memory, threads, locks) from faults of a
device or of stored bytes. In a shortage the operation was not tried, so the stored chunks may still be good.
"""

from __future__ import annotations

import errno
import os
from typing import Final

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK})
"""Errors of a process or machine with too many open files, or too little memory, or too few threads, kernel requests or
locks."""
_NO_THREAD: Final = ("can't start new thread", os.strerror(errno.EAGAIN))
"""Messages of Python and of the C++ library if the system cannot start a thread."""


class TierError(Exception):
    """Base of the exceptions of `hybridkv.tiers`."""


class TierProtocolError(TierError, RuntimeError):
    """A bug of the caller: a call that does not fit the state of a key, or a slot outside the tier."""


class TierConfigurationError(TierError, ValueError):
    """Invalid value of a tier's configuration.

    Args:
        field: name of the parameter.
        expected: description of a valid value.
        got: given value.
        hint: next step for the operator.
    """

    def __init__(self, field: str, expected: str, got: object, hint: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.hint = hint
        text = f"{field}: expected {expected}, got {got!r}"
        super().__init__(f"{text}\nhint: {hint}" if hint else text)


def is_shortage(error: BaseException) -> bool:
    """True if the error is a shortage of this process or machine. A later retry may succeed."""
    if isinstance(error, OSError):
        return error.errno in SHORTAGES
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _NO_THREAD)
    return isinstance(error, MemoryError)
