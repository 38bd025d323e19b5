"""Blocks of ended requests that children still read: given back when the last of those children is done.

The scheduler's half knows which children said that they read on; the worker's half hears from each when it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class SavesBegun:
    """The scheduler's half."""

    def __init__(self) -> None:
        self._tails: dict[str, set[int]] = {}
        self._ended: dict[str, frozenset[int]] = {}

    def tail_accepted(self, request_id: str, children: Iterable[int]) -> None:
        """These children read a partial block of a request that is about to end."""
        self._tails.setdefault(request_id, set()).update(children)

    def request_ended(self, request_id: str, children: Iterable[int]) -> bool:
        """These children read blocks of a request that ended. Whether any child does."""
        reading = frozenset(self._tails.pop(request_id, set())).union(children)
        if reading:
            self._ended[request_id] = reading
        return bool(reading)

    def take(self) -> dict[str, frozenset[int]]:
        """Requests that ended since the last call, for the workers."""
        ended, self._ended = self._ended, {}
        return ended


class SavesOpen:
    """The worker's half, on one rank."""

    def __init__(self) -> None:
        self._reading: dict[str, set[int]] = {}

    def begin(self, saving: Mapping[str, frozenset[int]]) -> None:
        """Requests that ended, and the children that read on."""
        for request_id, children in saving.items():
            self._reading.setdefault(request_id, set()).update(children)

    def end(self, child: int, request_ids: Iterable[str]) -> set[str]:
        """A child is done with these. The requests with which all are; what a child never held is not counted."""
        done = set()
        for request_id in request_ids:
            reading = self._reading.get(request_id)
            if reading is None or child not in reading:
                continue
            reading.discard(child)
            if not reading:
                del self._reading[request_id]
                done.add(request_id)
        return done
