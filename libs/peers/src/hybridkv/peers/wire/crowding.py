"""Which of many strangers gives way to a newer one. Shared by all listeners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def who_gives_way(hosts: Sequence[str]) -> int:
    """The oldest of the host that has most of them: whoever takes many places takes them from itself.

    An honest peer needs its place for milliseconds.

    Args:
        hosts: of strangers, in the order in which they came; one at least.
    """
    [(crowd, _)] = Counter(hosts).most_common(1)
    return hosts.index(crowd)
