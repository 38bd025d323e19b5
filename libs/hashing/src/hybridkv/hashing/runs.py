"""Keys of chunks that were derived before, for the next request with the same prefix.

A prefix hash stands for everything before it, so the hash that the last key of a run was derived from names the whole
run: one question finds `RUN_CHUNKS` keys. It makes no keys and asks no tier.
"""

from collections.abc import Sequence

RUN_CHUNKS = 16
"""Chunks in a run. Run r is chunks [r * RUN_CHUNKS, (r + 1) * RUN_CHUNKS)."""
DEFAULT_MAX_KEYS = 1 << 16
"""About 6 MB: 32 bytes a key, and what Python adds."""


class KeyRuns:
    """Remembers runs of keys of one cache; what was used least recently goes first.

    Args:
        num_groups: groups that keys are derived for.
        max_keys: keys that are remembered at most, over all groups.

    Raises:
        ValueError: a number is not positive, or not one run fits.
    """

    def __init__(self, num_groups: int, max_keys: int = DEFAULT_MAX_KEYS) -> None:
        if num_groups <= 0:
            raise ValueError(f"num_groups must be positive, got {num_groups}")
        if max_keys < RUN_CHUNKS:
            raise ValueError(f"max_keys must be at least one run of {RUN_CHUNKS}, got {max_keys}")
        self._max_runs = max_keys // RUN_CHUNKS
        self._runs: dict[tuple[int, bytes], Sequence[bytes]] = {}
        self.num_dropped = 0
        """Runs that were forgotten to make room."""

    @property
    def num_keys(self) -> int:
        return len(self._runs) * RUN_CHUNKS

    def find(self, group: int, last_hash: bytes) -> Sequence[bytes] | None:
        """The keys of the run whose last key was derived from `last_hash`, None if they are not remembered."""
        name = group, last_hash
        run = self._runs.pop(name, None)
        if run is not None:
            self._runs[name] = run
        return run

    def remember(self, group: int, last_hash: bytes, keys: Sequence[bytes]) -> None:
        """Keep the keys of one run, which must not change.

        Raises:
            ValueError: they are not `RUN_CHUNKS` keys.
        """
        if len(keys) != RUN_CHUNKS:
            raise ValueError(f"a run is {RUN_CHUNKS} keys, got {len(keys)}")
        self._runs.pop((group, last_hash), None)
        self._runs[group, last_hash] = keys
        if len(self._runs) > self._max_runs:
            del self._runs[next(iter(self._runs))]
            self.num_dropped += 1
