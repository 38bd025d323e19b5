"""Eviction order of the primary tier and one secondary tier, restored after chunks were copied between them.

Beginnings of prefixes are copied first, and pinned meanwhile, so they would be evicted before their ends. Touches wait
until the chunks sent before them have arrived, and then set the order. Sends nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridkv.tiers.contract import Key, TierIndex


@dataclass(slots=True, eq=False)
class SentBatch:
    """Keys sent and touched in a row. Their order is restored when all of them have arrived."""

    num_left: int = 0
    """Sent chunks that are in flight and not timed out, or wait for a retry."""
    order: list[Key] = field(default_factory=list)
    """Sent keys, then the keys touched after them."""
    num_touched: int = 0
    """Touched keys among them."""


class UseOrder:
    """Eviction order of the primary tier and one secondary tier.

    Args:
        primary: index of the primary tier.
        secondary: index of the secondary tier.
    """

    def __init__(self, primary: TierIndex, secondary: TierIndex) -> None:
        self.primary = primary
        self.secondary = secondary
        self._closed: SentBatch | None = None
        """Batch that waits for its last chunk."""
        self._batch = SentBatch()
        """Keys sent and touched since then."""
        self.num_touched = 0
        """Keys of all waiting touches, including those in the queue."""

    @property
    def is_ordering(self) -> bool:
        """True if a touch has to wait for chunks in flight."""
        return self._closed is not None or self._batch.num_left > 0

    def sent(self, key: Key) -> SentBatch:
        """A chunk was sent for the first time. Returns its batch."""
        batch = self._batch
        if not batch.num_left and self._closed is None:
            batch.order.clear()
        batch.num_left += 1
        batch.order.append(key)
        return batch

    def reach(self, keys: tuple[Key, ...]) -> None:
        """Touch keys at once, so that they are not evicted next; and again after the chunks in flight have arrived."""
        self.secondary.touch(keys)
        if not self.is_ordering:
            self.num_touched -= len(keys)
            self.primary.touch(keys)
            self._batch.order.clear()
            return
        self._batch.order += keys
        self._batch.num_touched += len(keys)
        if self._closed is None:
            self._closed, self._batch = self._batch, SentBatch()

    def count_off(self, batch: SentBatch) -> None:
        """A chunk of the batch arrived, failed or timed out."""
        batch.num_left -= 1
        if self._closed is not None and not self._closed.num_left:
            self._touch_what_came()

    def _touch_what_came(self) -> None:
        """Touch each completed batch in its order, and after it the keys sent and touched since, those that arrived.

        Chunks arrive out of order, and older keys must be evicted before either.
        """
        while self._closed is not None and not self._closed.num_left:
            self.num_touched -= self._closed.num_touched
            order = [*dict.fromkeys(reversed(self._closed.order))][::-1]  # each at its last position
            self.secondary.touch(order)
            self.primary.touch(order)
            self._closed = None
            if self._batch.num_touched:
                self._closed, self._batch = self._batch, SentBatch()
                if self._closed.num_left:
                    self.secondary.touch(self._closed.order)
            else:
                self.secondary.touch(self._batch.order)

    def clear(self) -> None:
        """Forget all batches."""
        self._closed, self._batch = None, SentBatch()
        self.num_touched = 0
