"""What happened to the records and is not written down yet: from the index's thread to the janitor's.

Bounded: when nobody writes it down for long, all of it is given up, and a snapshot takes its place. Touches no file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.changes import Change, Committed, Gone, Relocated, Reserved, Used

MAX_WAITING = 1 << 17
"""Changes that wait. At a second between two batches as many a second; about 20 MB."""
MAX_USES_IN_A_BATCH = 1 << 14
"""The last ones. What was used before them in the same second keeps the place it had."""


class GivenUpError(Exception):
    """The snapshot is not wanted any more that was planned at a cut."""


class Cut:
    """Where a snapshot was planned: what comes behind it belongs to the file that follows that snapshot."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def require_wanted(self) -> None:
        """Any thread may cancel; whoever writes the snapshot asks this from time to time."""
        if self.is_cancelled:
            raise GivenUpError


class Gap:
    """Something is missing here. What comes behind it may not be appended to what came before."""


_Waiting: TypeAlias = Change | int | Cut | Gap


class ChangeLog:
    """One for an index. Everything but `take` and `skip_to` is called in the index's thread."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        # An address alone was used. Either thread works on one end, and `clear` leaves an empty one behind.
        self._waiting: deque[_Waiting] = deque()
        self._is_closed = False
        self.is_scheduled = False
        """Somebody will take what waits. Whoever takes it says so first."""

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def reserved(self, address: int, payload_bytes: int) -> None:
        self._add(Reserved(address, payload_bytes))

    def committed(self, address: int, payload_bytes: int, key: Key) -> None:
        self._add(Committed(address, payload_bytes, key))

    def relocated(self, address: int, new_address: int) -> None:
        self._add(Relocated(address, new_address))

    def gone(self, address: int) -> None:
        self._add(Gone(address))

    def used(self, addresses: Iterable[int]) -> None:
        """In this order. Some may be missing, so they leave half the room to what may not."""
        if len(self._waiting) < self._max_waiting // 2 and not self._is_closed:
            self._waiting.extend(addresses)

    def cut(self) -> Cut:
        """A snapshot that is planned now speaks for everything until here."""
        cut = Cut()
        self._waiting.append(cut)
        return cut

    def give_up(self) -> None:
        """Forget what waits; nothing is written down before the next snapshot."""
        self._waiting.clear()
        self._waiting.append(Gap())

    def close(self) -> None:
        """Take nothing more."""
        self._is_closed = True

    def _add(self, change: Change) -> None:
        if self._is_closed:
            return
        if len(self._waiting) >= self._max_waiting:
            self.give_up()
        self._waiting.append(change)

    # In the janitor's thread.

    def take(self) -> tuple[list[Change], bool]:
        """What waits, up to the next cut, without uses that later ones make void. And whether it follows a gap."""
        self.is_scheduled = False
        taken: list[Change | int] = []
        has_gap = False
        while self._waiting:
            first = self._pop()
            if isinstance(first, Cut) and not first.is_cancelled:
                self._waiting.appendleft(first)
                break
            if isinstance(first, Gap):
                taken.clear()
                has_gap = True
            elif not (first is None or isinstance(first, Cut)):
                taken.append(first)
        return _last_uses(taken), has_gap

    def skip_to(self, cut: Cut) -> bool:
        """Forget what a snapshot speaks for. False when something is missing since."""
        while self._waiting:
            first = self._pop()
            if first is cut:
                return True
            if isinstance(first, Gap):
                self._waiting.appendleft(first)
                break
        return False

    def _pop(self) -> _Waiting | None:
        try:
            return self._waiting.popleft()
        except IndexError:  # given up at this moment
            return None


def _last_uses(taken: list[Change | int]) -> list[Change]:
    """Of each address only its last use, and of uses the last ones only."""
    seen: set[int] = set()
    kept: list[Change] = []
    for change in reversed(taken):
        if not isinstance(change, int):
            kept.append(change)
        elif change not in seen and len(seen) < MAX_USES_IN_A_BATCH:
            seen.add(change)
            kept.append(Used(change))
    kept.reverse()
    return kept
