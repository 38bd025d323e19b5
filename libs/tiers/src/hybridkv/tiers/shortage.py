"""Tells what this process lacks, files, memory or threads, from what is wrong with a device or with stored bytes.

Who lacks something has not tried anything: the medium is not to blame, and what it holds is as good as before.
"""

from __future__ import annotations

import errno
import os
from typing import Final

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK})
"""Open files of this process or of the machine, memory, threads or requests of the kernel's, locks."""
_NO_THREAD: Final = ("can't start new thread", os.strerror(errno.EAGAIN))
"""What Python and a C++ library say where the system gives no thread."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that this process lacks something, for now."""
    if isinstance(error, OSError):
        return error.errno in SHORTAGES
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _NO_THREAD)
    return isinstance(error, MemoryError)
