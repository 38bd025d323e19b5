"""Server of LMCache, and the packages that LMCache needs in an engine's process. This module does not import LMCache.

There are two environment variables for each version:

- `HYBRIDKV_LMCACHE_0_5_7RC2`: command of the server. It runs `libs/lmcache/tests/lmcache_command.py` with that version.
- `HYBRIDKV_LMCACHE_PACKAGES_0_5_7RC2`: directory with that version, and with its dependencies that vLLM lacks. The
  directory is the last one in the path, so LMCache and vLLM both import vLLM's versions.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kits.lmcache.server_process import ServerProcess, command, variable

PREFIX = "HYBRIDKV_LMCACHE"
POLL_S = 0.002
QUIET_S = 2.0
STORED_WITHIN_S = 60.0


def packages_variable(version: str) -> str:
    return variable(version).replace(PREFIX, f"{PREFIX}_PACKAGES")


def packages(version: str) -> str:
    """The directory of the variable. Call `missing_settings` before."""
    return os.path.abspath(os.environ[packages_variable(version)])


def missing_settings(version: str) -> str | None:
    """A sentence about a missing variable or package, or None."""
    if command(version) is None:
        return f"{variable(version)} is not set: a command that runs lmcache_command.py with {version}"
    directory = os.environ.get(packages_variable(version))
    if directory is None:
        return f"{packages_variable(version)} is not set: a directory with the package lmcache {version}"
    if not (Path(directory) / "lmcache").is_dir():
        return f"{packages_variable(version)}: {directory} has no package lmcache"
    return None


class Held(NamedTuple):
    """Complete objects of a server, the bytes of its memory, and incoming objects."""

    objects: int
    bytes: int
    incoming: int


class LMCacheServer(ServerProcess):
    """A server on loopback that keeps all objects in memory."""

    def __init__(self, version: str, directory: Path, arguments: Sequence[str]) -> None:
        lmcache = command(version)
        assert lmcache is not None
        super().__init__(lmcache, directory, arguments)

    @property
    def url(self) -> str:
        return f"tcp://{self.address.host}:{self.address.port}"

    def held(self) -> Held:
        """Status of the server's memory. Incomplete objects count only as incoming."""
        memory = self.status()["storage_manager"]["l1_manager"]
        incoming = memory["write_locked_count"]
        return Held(memory["total_object_count"] - incoming, memory["memory_used_bytes"], incoming)

    def clear(self) -> None:
        url = f"http://{self.address.host}:{self.address.http_port}/cache/clear"
        with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"), timeout=30.0) as answer:
            answer.read()
        left = self.held()
        if left.objects:
            raise RuntimeError(f"{left.objects} objects are still held after the server was cleared")

    def wait_for(self, objects: int) -> None:
        """Returns when the server has `objects` objects."""
        until_s = time.monotonic() + STORED_WITHIN_S
        while (held := self.held().objects) < objects:
            if time.monotonic() > until_s:
                raise RuntimeError(f"{held} of {objects} objects were stored in {STORED_WITHIN_S:.0f} s")
            time.sleep(POLL_S)

    def settled(self) -> Held:
        """Content of the server after two seconds without a change."""
        last, since_s = self.held(), time.monotonic()
        while last.incoming or time.monotonic() < since_s + QUIET_S:
            time.sleep(QUIET_S / 20)
            if (now := self.held()) != last:
                last, since_s = now, time.monotonic()
        return last
