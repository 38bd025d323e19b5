"""Command of the `lmcache` that a test starts."""

import pytest

from kits.lmcache.server_process import command, variable


def lmcache_of(version: str) -> list[str]:
    """Returns the command of a version. Skips the test where that version is not installed."""
    found = command(version)
    if found is None:
        pytest.skip(f"{variable(version)} names no lmcache of version {version}")
    return found
