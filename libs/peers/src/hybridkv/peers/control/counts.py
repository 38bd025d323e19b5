"""What happened on control connections. Values that merge by adding; how they are exported is not decided here."""

from __future__ import annotations

import msgspec

from hybridkv.peers.wire import CloseReason


class ControlCounts(msgspec.Struct, frozen=True):
    """Since the start of the loop."""

    opened: int
    sent_frames: int
    received_frames: int
    refused_sends: int
    """Messages for a link that was not open, or that took no more."""
    closed: dict[CloseReason, int]
    """By reason, handshakes that failed among them."""


class Tally:
    """A mutable `ControlCounts`, for the loop's thread."""

    def __init__(self) -> None:
        self.opened = 0
        self.sent_frames = 0
        self.received_frames = 0
        self.refused_sends = 0
        self.closed: dict[CloseReason, int] = {}

    def close(self, reason: CloseReason) -> None:
        self.closed[reason] = self.closed.get(reason, 0) + 1

    def value(self) -> ControlCounts:
        return ControlCounts(
            self.opened, self.sent_frames, self.received_frames, self.refused_sends, self.closed.copy()
        )
