"""Frames: a length of four bytes, and so many bytes. Cuts a stream into them, and holds no more than one of them.

Does not know what is in a frame.
"""

from __future__ import annotations

from hybridkv.peers.wire.closing import CloseReason, WireError

LENGTH_BYTES = 4


def frame(body: bytes) -> bytes:
    """`body` as it goes over the connection."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameReader:
    """Cuts what arrives into frames. `WireError` OVERSIZED as soon as a length is known that is too great.

    What is buffered is at most one frame that has not ended, plus what the last `feed` brought: a frame is taken out of
    it one at a time, so that a limit that the last one changed holds for the next.
    """

    __slots__ = ("_buffer", "_start", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._start = 0

    def feed(self, data: bytes | memoryview) -> None:
        """What arrived. Call `next` until it says None before feeding more."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole frame, without its length; None until more arrives."""
        start = self._start
        if len(self._buffer) - start < LENGTH_BYTES:
            return None
        num_bytes = int.from_bytes(self._buffer[start : start + LENGTH_BYTES], "big")
        if num_bytes > self.max_frame_bytes:
            raise WireError(CloseReason.OVERSIZED, f"a frame of {num_bytes} bytes; at most {self.max_frame_bytes}")
        end = start + LENGTH_BYTES + num_bytes
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[start + LENGTH_BYTES : end])
        self._start = end
        return body

    def rest(self) -> bytes:
        """What arrived behind the last frame that was taken, and is now the caller's."""
        rest = bytes(memoryview(self._buffer)[self._start :])
        self._buffer.clear()
        self._start = 0
        return rest

    @property
    def num_buffered_bytes(self) -> int:
        return len(self._buffer) - self._start
