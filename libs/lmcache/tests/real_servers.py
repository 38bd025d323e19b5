"""Which `lmcache` a test starts."""

import pytest

from kits.lmcache.server_process import command, variable


def lmcache_of(version: str) -> list[str]:
    """The command of a version. A test that needs it is skipped where it is not here."""
    found = command(version)
    if found is None:
        pytest.skip(f"{variable(version)} names no lmcache of version {version}")
    return found
