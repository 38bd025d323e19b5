"""Lookups before stores: another engine may have stored a chunk since a request looked it up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridkv.tiers.contract import Key
from hybridkv.tiers.remote import LookupTracker

MAX_ANNOUNCED = 16_384
"""Limit of remembered keys of paths, for lookups before stores. The newest path is always remembered completely."""
OPEN_KEYS_DIVISOR = 2
"""Lookups before stores are sent only while fewer than `max_open_keys` / `OPEN_KEYS_DIVISOR` keys are open. The other
open keys are for requests."""
FRESH_ANSWER_S = 0.5
"""A key is not looked up before its store if a lookup found the key missing within this time."""
CHECKED_S = 5.0
"""Validity of a lookup before a store, from its start, if an attempt to store has used its answer."""
KEPT_S = 60.0
"""Validity of a lookup before a store, from its start, if no attempt has used its answer: engine steps may be long."""


@dataclass(slots=True)
class _KeyCheck:
    """Last lookup of a key before its store."""

    began_s: float
    is_sent: bool
    """False if the lookup was not sent, because requests use all open keys. Then the store waits for the timeout."""
    was_used: bool
    """True if an attempt to store has used its answer."""

    def is_over(self, now_s: float) -> bool:
        return now_s - self.began_s > (CHECKED_S if self.was_used else KEPT_S)


class StoreChecks:
    """Decides which chunks are looked up before they are stored, and when a chunk may be stored.

    A key of an announced path is looked up together with the keys after it. Other keys are not looked up.

    Args:
        tracker: open lookups, also of requests.
        start_lookup: sends a lookup of keys with a deadline.
        timeout_s: longest time that a store waits for an answer.
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
        """Number of keys on these paths."""
        self._path_of: dict[Key, Sequence[Key]] = {}
        """Newest path of each key."""
        self._checks: dict[Key, _KeyCheck] = {}
        """Last check of each key to store, the oldest first."""

    def announce(self, path: Sequence[Key]) -> None:
        """Remember the keys of a request's path, in prefix order."""
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
        """Look up these keys, which may be stored soon. Leaves out keys with a valid lookup or without an announced
        path."""
        now_s, checks, tracker, path_of = self._clock(), self._checks, self._tracker, self._path_of
        for key in keys:
            if key not in path_of or tracker.is_pending(key):
                continue
            check = checks.get(key)
            if check is None and tracker.is_missing(key, now_s - FRESH_ANSWER_S):
                self._remember(key, now_s, is_sent=True, was_used=True)
            elif check is not None and self._is_valid(check, now_s):
                check.was_used = True
            else:
                self._look_up(key, now_s)

    def may_store(self, key: Key) -> bool:
        """True if a key may be stored now: it has no announced path, its lookup has ended, or its lookup could not be
        sent for `timeout_s`. Looks the key up if `prepare` was not called for it."""
        if key not in self._path_of:
            return True
        if key not in self._checks:
            self.prepare((key,))
        check = self._checks.get(key)
        if check is None or self._tracker.is_pending(key):
            return False
        return check.is_sent or self._clock() - check.began_s >= self._timeout_s

    def _is_valid(self, check: _KeyCheck | None, now_s: float) -> bool:
        return check is not None and check.is_sent and not check.is_over(now_s)

    def forget(self, key: Key) -> None:
        """Forget the check of a key, because the key is being stored."""
        self._checks.pop(key, None)

    def clear(self) -> None:
        """Forget all checks. Announced paths stay."""
        self._checks.clear()

    def _look_up(self, key: Key, now_s: float) -> None:
        """Look up a key and the keys after it on its path, except keys with a valid lookup."""
        tracker, checks = self._tracker, self._checks
        room = tracker.max_open_keys // OPEN_KEYS_DIVISOR - tracker.num_open_keys
        if room <= 0:
            check = checks.get(key)
            if check is None or check.is_over(now_s):
                self._remember(key, now_s, is_sent=False, was_used=False)
            return
        path = self._path_of[key]
        keys = [each for each in path[path.index(key) :] if not self._is_valid(checks.get(each), now_s)][:room]
        tracker.forget_missing(keys, now_s - FRESH_ANSWER_S)
        self._start_lookup(keys, now_s + self._timeout_s)
        for each in keys:
            self._remember(each, now_s, is_sent=True, was_used=False)

    def _remember(self, key: Key, now_s: float, *, is_sent: bool, was_used: bool) -> None:
        self._checks.pop(key, None)
        self._checks[key] = _KeyCheck(now_s, is_sent, was_used)
        if len(self._checks) > MAX_ANNOUNCED:
            del self._checks[next(iter(self._checks))]
