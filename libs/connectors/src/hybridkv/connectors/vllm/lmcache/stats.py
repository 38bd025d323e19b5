"""What a half of the connector counts of its server: each time what is new since the last."""

from __future__ import annotations

from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.lmcache.operations import OperationCounts

_NOTHING = OperationCounts()


class ServerCounts:
    """Hands the recorder what changed.

    Args:
        recorder: of this half.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._counted = _NOTHING
        self._is_up: bool | None = None
        self._pool: tuple[int, int] | None = None

    def operations(self, now: OperationCounts) -> None:
        """What was asked of the server, since its connection was opened."""
        before, self._counted = self._counted, now
        if now == before:
            return
        lacks = {name: number - before.lacks.get(name, 0) for name, number in now.lacks.items()}
        found = now.found - before.found
        asked = {
            "lookup": now.lookups - before.lookups,
            "retrieve": now.retrieves - before.retrieves,
            "store": now.stores - before.stores,
        }
        for name, number in lacks.items():
            operation, _, trouble = name.partition(" ")
            asked[operation] -= number
            self._count(operation, trouble, number)
        self._count("lookup", "done", found)
        self._count("lookup", "nothing", asked["lookup"] - found)
        self._count("retrieve", "done", asked["retrieve"])
        self._count("store", "done", asked["store"])
        for operation, chunks in (
            ("retrieve", now.retrieved_chunks - before.retrieved_chunks),
            ("store", now.stored_chunks - before.stored_chunks),
        ):
            if chunks:
                self._recorder.server_chunks(operation, chunks)

    def state(self, is_up: bool) -> None:
        """Whether the server can be asked."""
        if is_up != self._is_up:
            self._is_up = is_up
            self._recorder.server_state(is_up)

    def pool(self, used_bytes: int, capacity_bytes: int) -> None:
        """The memory that is shared."""
        if (used_bytes, capacity_bytes) != self._pool:
            self._pool = (used_bytes, capacity_bytes)
            self._recorder.server_pool(used_bytes, capacity_bytes)

    def _count(self, operation: str, outcome: str, number: int) -> None:
        if number:
            self._recorder.server_operations(operation, outcome, number)
