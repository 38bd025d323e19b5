"""Choice of the stranger that is closed when there are too many. Shared by all listeners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def stranger_to_close(hosts: Sequence[str]) -> int:
    """Index of the oldest stranger of the host with the most strangers, so a flood from one host displaces itself.

    An honest peer is a stranger for milliseconds.

    Args:
        hosts: hosts of the strangers, oldest first; at least one.
    """
    [(crowd, _)] = Counter(hosts).most_common(1)
    return hosts.index(crowd)
