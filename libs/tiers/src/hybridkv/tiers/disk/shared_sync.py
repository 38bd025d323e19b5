"""Syncs of one open file for all that write to it: one at a time, each for whatever was written before it began.

Linux says once for each open file that writing back went wrong, to whoever syncs it then; what was lost by it is lost
for all. So a sync that fails is also a failed one of everybody who had begun to write by its end, whatever a later
sync says. Whose bytes were lost nobody knows: who writes them again, and syncs, is safe.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable


class SharedSync:
    """Of one descriptor. Any thread may use it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_running = False
        self._num_begun = 0
        self._num_ended = 0
        self._error_number = 0
        self.num_failed = 0
        """Whoever writes asks for it before."""

    def sync(self, call: Callable[[], None], num_failed: int) -> None:
        """Returns when all that this thread wrote is on the device. `call` syncs, where nobody else does.

        `OSError` also where a sync went wrong since the caller asked for `num_failed`, which was before it wrote.
        """
        if self._is_mine():
            self._run(call)
        with self._condition:
            if self.num_failed != num_failed:
                raise OSError(self._error_number, os.strerror(self._error_number))

    def _is_mine(self) -> bool:
        """Wait for the first sync that begins from now on. Whether it is this thread's to make."""
        with self._condition:
            wanted = self._num_begun + 1
            self._condition.wait_for(lambda: self._num_ended >= wanted or not self._is_running)
            if self._num_ended >= wanted:
                return False
            self._is_running = True
            self._num_begun += 1
            return True

    def _run(self, call: Callable[[], None]) -> None:
        error_number = errno.EIO  # whatever else is raised
        try:
            call()
            error_number = 0
        except OSError as error:
            error_number = error.errno or error_number
        finally:
            with self._condition:
                self._is_running = False
                self._num_ended += 1
                if error_number:
                    self.num_failed += 1
                    self._error_number = error_number
                self._condition.notify_all()
