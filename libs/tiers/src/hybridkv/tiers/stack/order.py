"""The order of use in two tiers, put right behind what is copied from one to the other.

Beginnings are copied first, and pinned for it, so each would be evicted before its end. What is touched behind them
waits until they have come, and then says how it should be. Sends nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridkv.tiers.contract import Key, TierIndex


@dataclass(slots=True, eq=False)
class Batch:
    """What was sent and touched in a row, whose order of use is put right when all of it has come."""

    num_left: int = 0
    """Of what was sent, what is on its way in time, or waits to be sent again."""
    order: list[Key] = field(default_factory=list)
    """What was sent, and what was touched behind it."""
    num_touched: int = 0
    """Keys of touches among them."""


class UseOrder:
    """Of a fast tier and one slower one.

    Args:
        near: index of the fast tier.
        far: index of the slower one.
    """

    def __init__(self, near: TierIndex, far: TierIndex) -> None:
        self.near = near
        self.far = far
        self._closed: Batch | None = None
        """Its order is put right when the last of it has come."""
        self._batch = Batch()
        """What was sent and touched since that was closed."""
        self.num_touched = 0
        """Keys of all touches that wait, also in the queue."""

    @property
    def is_ordering(self) -> bool:
        """Whether something is on its way behind which a touch has to wait."""
        return self._closed is not None or self._batch.num_left > 0

    def sent(self, key: Key) -> Batch:
        """A chunk is on its way for the first time. Who counts it."""
        batch = self._batch
        if not batch.num_left and self._closed is None:
            batch.order.clear()
        batch.num_left += 1
        batch.order.append(key)
        return batch

    def reach(self, keys: tuple[Key, ...]) -> None:
        """At once, so that what comes next pushes out others first; and again when what is on its way has come."""
        self.far.touch(keys)
        if not self.is_ordering:
            self.num_touched -= len(keys)
            self.near.touch(keys)
            self._batch.order.clear()
            return
        self._batch.order += keys
        self._batch.num_touched += len(keys)
        if self._closed is None:
            self._closed, self._batch = self._batch, Batch()

    def count_off(self, batch: Batch) -> None:
        """One of those it counted has come, or is waited for no longer."""
        batch.num_left -= 1
        if self._closed is not None and not self._closed.num_left:
            self._touch_what_came()

    def _touch_what_came(self) -> None:
        """Each batch in its order, and above it what was sent and touched since, as far as that has come.

        Chunks overtake each other on their way, and what follows must push out neither before what is older than both.
        """
        while self._closed is not None and not self._closed.num_left:
            self.num_touched -= self._closed.num_touched
            order = [*dict.fromkeys(reversed(self._closed.order))][::-1]  # each where it was named last
            self.far.touch(order)
            self.near.touch(order)
            self._closed = None
            if self._batch.num_touched:
                self._closed, self._batch = self._batch, Batch()
                if self._closed.num_left:
                    self.far.touch(self._closed.order)
            else:
                self.far.touch(self._batch.order)

    def clear(self) -> None:
        """Forget what is waited for."""
        self._closed, self._batch = None, Batch()
        self.num_touched = 0
