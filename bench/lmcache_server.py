"""A server of LMCache, and where what LMCache needs in an engine's process lies. Nothing of LMCache is imported here.

For each version two environment variables:

* `HYBRIDKV_LMCACHE_0_5_7RC2`: a command that runs `libs/lmcache/tests/lmcache_command.py` beside that version, which is
  the server;
* `HYBRIDKV_LMCACHE_PACKAGES_0_5_7RC2`: a directory with that version and the packages of its that vLLM lacks. It is put
  behind all others, so that vLLM's versions are what both import.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kits.lmcache.server_process import ServerProcess, command, variable

TOLD = "HYBRIDKV_LMCACHE"
ASK_AGAIN_S = 0.002
QUIET_S = 2.0
STORED_WITHIN_S = 60.0


def packages_variable(version: str) -> str:
    return variable(version).replace(TOLD, f"{TOLD}_PACKAGES")


def packages(version: str) -> str:
    """The directory that the variable names. Look for `what_is_missing` before."""
    return os.path.abspath(os.environ[packages_variable(version)])


def what_is_missing(version: str) -> str | None:
    """A sentence; None where nothing is."""
    if command(version) is None:
        return f"{variable(version)} is not set: a command that runs lmcache_command.py beside {version}"
    directory = os.environ.get(packages_variable(version))
    if directory is None:
        return f"{packages_variable(version)} is not set: a directory that has the package lmcache {version}"
    if not (Path(directory) / "lmcache").is_dir():
        return f"{packages_variable(version)}: {directory} has no package lmcache"
    return None


class Held(NamedTuple):
    """What a server can give back, and what it is being given."""

    objects: int
    bytes: int
    incoming: int


class LMCacheServer(ServerProcess):
    """One server on loopback that holds everything in memory."""

    def __init__(self, version: str, directory: Path, arguments: Sequence[str]) -> None:
        lmcache = command(version)
        assert lmcache is not None
        super().__init__(lmcache, directory, arguments)

    @property
    def url(self) -> str:
        return f"tcp://{self.address.host}:{self.address.port}"

    def held(self) -> Held:
        """What it says of its memory. An object that is being written is none yet."""
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
        """Return when it holds so many."""
        until_s = time.monotonic() + STORED_WITHIN_S
        while (held := self.held().objects) < objects:
            if time.monotonic() > until_s:
                raise RuntimeError(f"{held} of {objects} objects were stored in {STORED_WITHIN_S:.0f} s")
            time.sleep(ASK_AGAIN_S)

    def settled(self) -> Held:
        """What it holds when that has not changed for two seconds."""
        last, since_s = self.held(), time.monotonic()
        while last.incoming or time.monotonic() < since_s + QUIET_S:
            time.sleep(QUIET_S / 20)
            if (now := self.held()) != last:
                last, since_s = now, time.monotonic()
        return last
