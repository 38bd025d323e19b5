"""What a tier raises: the caller's mistakes and the operator's. Never what a medium met: that comes back as a value."""

from __future__ import annotations

import errno
import os
from typing import Final

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK})
"""Open files of this process or of the machine, memory, threads or requests of the kernel's, locks."""
_NO_THREAD: Final = ("can't start new thread", os.strerror(errno.EAGAIN))
"""What Python and a C++ library say where the system gives no thread."""


class TierError(Exception):
    """Base of everything that `hybridkv.tiers` raises on purpose."""


class TierProtocolError(TierError, RuntimeError):
    """The caller broke the life cycle of a key or named a place that the tier does not have: a bug, not a full disk."""


class TierConfigurationError(TierError, ValueError):
    """A value from the operator's configuration that a tier cannot work with.

    `field` is the parameter, `expected` says what would do, `got` is what was given, `hint` what to try next.
    """

    def __init__(self, field: str, expected: str, got: object, hint: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.hint = hint
        text = f"{field}: expected {expected}, got {got!r}"
        super().__init__(f"{text}\nhint: {hint}" if hint else text)


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that this process lacks something, for now."""
    if isinstance(error, OSError):
        return error.errno in SHORTAGES
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _NO_THREAD)
    return isinstance(error, MemoryError)
