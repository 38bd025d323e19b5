"""Lookups before stores: another engine may have stored a chunk since a request looked it up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridkv.tiers.contract import Key
from hybridkv.tiers.remote import LookupTracker

MAX_ANNOUNCED = 16_384
"""Keys of paths that are remembered, to look them up before they are stored. The newest path is, however long."""
OPEN_KEYS_DIVISOR = 2
"""Lookups before stores are sent while fewer than `max_open_keys` divided by this are open. Requests get the rest."""
FRESH_ANSWER_S = 0.5
"""A key is looked up before it is stored, unless a lookup found within this time that it is missing."""
CHECKED_S = 5.0
"""A lookup before a store counts for this time."""
KEPT_S = 60.0
"""It counts for the first attempt to store after its answer up to this time, since an engine's step may be long."""


@dataclass(slots=True)
class _KeyCheck:
    """Last lookup of a key before its store."""

    began_s: float
    is_sent: bool
    """False: requests use all open keys, and the store waits for the time-out."""
    was_offered: bool
    """Its answer counted for one attempt to store."""

    def is_over(self, now_s: float) -> bool:
        return now_s - self.began_s > (CHECKED_S if self.was_offered else KEPT_S)


class StoreChecks:
    """Decides which chunks are looked up before they are stored, and when a chunk may be stored.

    A key of an announced path is looked up together with those that follow it. A key without such a path is not.

    Args:
        tracker: open lookups, of requests too.
        start_lookup: sends a lookup of keys with a deadline.
        timeout_s: a store waits so long for an answer.
        clock: seconds.
    """

    def __init__(
        self,
        tracker: LookupTracker,
        start_lookup: Callable[[Sequence[Key], float], None],
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._tracker = tracker
        self._start_lookup = start_lookup
        self._timeout_s = timeout_s
        self._clock = clock
        self._paths: deque[Sequence[Key]] = deque()
        """Paths of the last requests, the newest last."""
        self._num_announced = 0
        """Their keys."""
        self._path_of: dict[Key, Sequence[Key]] = {}
        """Newest of these paths with a key."""
        self._checks: dict[Key, _KeyCheck] = {}
        """Of the keys to store, the oldest first."""

    def announce(self, path: Sequence[Key]) -> None:
        """Remember the path of a request, from its beginning on."""
        self._paths.append(path)
        self._num_announced += len(path)
        self._path_of.update(dict.fromkeys(path, path))
        while self._num_announced > MAX_ANNOUNCED and len(self._paths) > 1:
            dropped = self._paths.popleft()
            self._num_announced -= len(dropped)
            for key in dropped:
                if self._path_of.get(key) is dropped:
                    del self._path_of[key]

    def prepare(self, keys: Sequence[Key]) -> None:
        """Look up the keys that may be stored soon, if no lookup of them counts."""
        now_s, checks, tracker, path_of = self._clock(), self._checks, self._tracker, self._path_of
        for key in keys:
            if key not in path_of or tracker.is_pending(key):
                continue
            check = checks.get(key)
            if check is None and tracker.is_missing(key, now_s - FRESH_ANSWER_S):
                self._begin(key, now_s, is_sent=True, was_offered=True)
            elif check is not None and self._counts(check, now_s):
                check.was_offered = True
            else:
                self._look_up(key, now_s)

    def may_store(self, key: Key) -> bool:
        """Whether a key may be stored now: it has no path, or the answer of a lookup came, or was awaited long enough.
        Looks it up if `prepare` was not called for it."""
        if key not in self._path_of:
            return True
        if key not in self._checks:
            self.prepare((key,))
        check = self._checks.get(key)
        if check is None or self._tracker.is_pending(key):
            return False
        return check.is_sent or self._clock() - check.began_s >= self._timeout_s

    def _counts(self, check: _KeyCheck | None, now_s: float) -> bool:
        return check is not None and check.is_sent and not check.is_over(now_s)

    def forget(self, key: Key) -> None:
        """The key is being stored."""
        self._checks.pop(key, None)

    def clear(self) -> None:
        """No earlier lookup counts any more."""
        self._checks.clear()

    def _look_up(self, key: Key, now_s: float) -> None:
        """Look up a key and those that follow it, except those with a lookup that counts."""
        tracker, checks = self._tracker, self._checks
        room = tracker.max_open_keys // OPEN_KEYS_DIVISOR - tracker.num_open_keys
        if room <= 0:
            check = checks.get(key)
            if check is None or check.is_over(now_s):
                self._begin(key, now_s, is_sent=False, was_offered=False)
            return
        path = self._path_of[key]
        keys = [each for each in path[path.index(key) :] if not self._counts(checks.get(each), now_s)][:room]
        tracker.forget_missing(keys, now_s - FRESH_ANSWER_S)
        self._start_lookup(keys, now_s + self._timeout_s)
        for each in keys:
            self._begin(each, now_s, is_sent=True, was_offered=False)

    def _begin(self, key: Key, now_s: float, *, is_sent: bool, was_offered: bool) -> None:
        self._checks.pop(key, None)
        self._checks[key] = _KeyCheck(now_s, is_sent, was_offered)
        if len(self._checks) > MAX_ANNOUNCED:
            del self._checks[next(iter(self._checks))]
