"""One connection without its socket: bytes that arrived go in, bytes to send and opened bodies come out.

First the handshake, then sealed frames. Which side it is, and what the bodies mean, is its owner's.
"""

from __future__ import annotations

from hybridkv.peers.wire.closing import CloseReason, WireError
from hybridkv.peers.wire.framing import LENGTH_BYTES, FrameReader, frame
from hybridkv.peers.wire.handshake import ClientHandshake, Established, ServerHandshake, goodbye
from hybridkv.peers.wire.limits import WireLimits
from hybridkv.peers.wire.sealing import SEAL_BYTES, Opener, Sealer

_TELLING = frozenset({CloseReason.VERSION, CloseReason.SECRET, CloseReason.UNEXPECTED, CloseReason.SELF})
"""What a side that fails a handshake says on its way out, so that both logs name the reason."""


class Session:
    """`output` is what to send: take bytes from its front as the connection accepts them."""

    def __init__(self, handshake: ClientHandshake | ServerHandshake, limits: WireLimits) -> None:
        self._handshake: ClientHandshake | ServerHandshake | None = handshake
        self._limits = limits
        self._reader = FrameReader(limits.max_handshake_frame_bytes)
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._is_server = isinstance(handshake, ServerHandshake)
        self.established: Established | None = None
        self.output = bytearray()
        if isinstance(handshake, ClientHandshake):
            self.output += frame(handshake.first)

    def feed(self, data: bytes | memoryview) -> None:
        """What arrived. Call `next` until it says None."""
        self._reader.feed(data)

    def next(self) -> bytes | None:
        """The body of the next sealed frame; None when there is none yet. `WireError`: the connection must end."""
        while (body := self._reader.next()) is not None:
            if self._opener is not None:
                return self._opener.open(body)
            self._go_on(body)
        return None

    def seal(self, body: bytes) -> bool:
        """Append a frame to `output`. False, and nothing done, when too much waits there already."""
        if self._sealer is None:
            raise WireError(CloseReason.UNEXPECTED, "nothing is said before both sides have proven the secret")
        if len(self.output) + LENGTH_BYTES + len(body) + SEAL_BYTES > self._limits.max_buffered_bytes:
            return False
        self.output += frame(self._sealer.seal(body))
        return True

    def ended(self) -> CloseReason:
        """Why it ended, if the other side closed its end now."""
        return CloseReason.TRUNCATED if self._reader.num_buffered_bytes else CloseReason.ENDED

    def last_words(self, reason: CloseReason) -> bytes:
        """What to say before closing for this reason, as far as the connection takes it at once."""
        if self.established is None and self._is_server and reason in _TELLING:
            return frame(goodbye(reason))
        return b""

    def _go_on(self, body: bytes) -> None:
        assert self._handshake is not None
        answer, established = self._handshake.receive(body)
        if answer is not None:
            self.output += frame(answer)
        if established is None:
            return
        mine, theirs = established.keys.from_client, established.keys.from_server
        if self._is_server:
            mine, theirs = theirs, mine
        self._sealer, self._opener = Sealer(mine), Opener(theirs)
        self._reader.max_frame_bytes = self._limits.max_frame_bytes
        self._handshake = None
        self.established = established
