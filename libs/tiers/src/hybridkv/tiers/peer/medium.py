"""Medium of one rank for a peer tier: reads chunks from peers' memory. The peers can read this rank's memory too.

A `Transport` reads straight into the destination if that is registered memory, otherwise into a temporary buffer. A
load succeeds only if the digest of the bytes equals the digest in the peer's seal of the chunk. So a reused slot and a
torn read fail the load. One thread makes all calls of the transport until `close`; callers queue loads and poll
completions.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hybridkv.peers.control import LinkId
from hybridkv.peers.wire import CloseReason, WireError, unpack_columns
from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, SealedMemory, Slot, Ticket
from hybridkv.tiers.peer import messages
from hybridkv.tiers.peer.options import MAX_KEYS, PeerOptions
from hybridkv.tiers.peer.reader import PeerLoad, PeerReader
from hybridkv.tiers.remote import RemoteMedium

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

BUSY_S, IDLE_S = 0.001, 0.05
"""Polling intervals of the thread with and without open loads."""
CLOSE_S = 5.0
_NONE = bytes(messages.DIGEST_BYTES)


class PeerMedium(RemoteMedium):
    """Read-only `TierMedium`: each store fails.

    Args:
        reader: reads from peers. The medium closes it.
        options: bounds.
        clock: seconds.
    """

    def __init__(self, reader: PeerReader, options: PeerOptions, clock: Callable[[], float]) -> None:
        super().__init__(options.max_waiting)
        self._clock = clock
        self._is_closing = False
        self._reader, self._inbox = reader, reader.inbox
        reader.on_ended = self._end
        self._thread = threading.Thread(target=self._run, name="hybridkv-peer-reader", daemon=True)
        self._thread.start()

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        if self._begin(ticket, slot, source, is_store=True) is not None:
            self._end(Completion(ticket, Failure(FailureReason.IO, "nothing is stored at a peer")))

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        views = self._begin(ticket, slot, destination, is_store=False)
        if views is None:
            return
        try:
            load = PeerLoad(ticket, key, slot, views, self._clock())
        except (ValueError, OverflowError) as error:
            self._end(Completion(ticket, Failure(FailureReason.IO, f"the slot is not a place at a peer: {error}")))
            return
        self._inbox.put(lambda: self._reader.begin(load))

    def close(self) -> None:
        """Fail all loads with CLOSED, within a bounded time. After that, peers cannot read this memory, unless the
        transport does not close in time."""
        if self._is_closed:
            return
        self._is_closed = True
        self._inbox.put(self._begin_closing)
        self._thread.join(CLOSE_S)
        self._reader.close(has_thread_ended=not self._thread.is_alive())

    # On the thread.

    def _begin_closing(self) -> None:
        self._is_closing = True

    def _run(self) -> None:
        while not self._is_closing:
            for part in (self._wait, self._run_inbox, self._reader.step):
                self._safely(part)

    def _safely(self, part: Callable[[], None]) -> None:
        """Run one step. An exception is logged, and other loads continue."""
        try:
            part()
        except Exception:
            logger.exception("unexpected error in the peer tier")
            time.sleep(BUSY_S)

    def _wait(self) -> None:
        if self._reader.is_busy:
            self._reader.wait(BUSY_S)

    def _run_inbox(self) -> None:
        """Run the work in the inbox."""
        try:
            (self._inbox.get_nowait() if self._reader.is_busy else self._inbox.get(timeout=IDLE_S))()
            for _ in range(self._inbox.qsize()):
                self._inbox.get_nowait()()
        except queue.Empty:
            pass


class RankSeals:
    """Answers peers' requests for the digests in the seals of this rank. Thread-safe. Reads no chunk.

    Args:
        memory: this rank's memory of the primary tier.
    """

    def __init__(self, memory: SealedMemory) -> None:
        self._memory = memory

    def on_request(self, link: LinkId, body: bytes) -> bytes:
        message = messages.decode(body)
        if not isinstance(message, messages.SealsRequest):
            raise WireError(CloseReason.UNEXPECTED, type(message).__name__)
        keys = messages.unpack_keys(message.keys, message.ends)
        (offsets,) = unpack_columns(message.offsets, 1, MAX_KEYS)
        if len(offsets) != len(keys):
            raise WireError(CloseReason.MALFORMED, "as many offsets as keys are needed")
        return messages.encode(
            messages.seals_reply(self._seal(*each) for each in zip(keys, offsets.tolist(), strict=True))
        )

    def _seal(self, key: Key, offset: int) -> tuple[int, bytes]:
        slot = Slot(((offset, 1),))
        digest = self._memory.sealed_checksum(key, slot)
        if digest is not None:
            return messages.SEALED, digest
        # Report another key's seal without reading the bytes.
        [failure] = self._memory.check_all([(key, slot)])
        is_another = failure is not None and failure.reason is FailureReason.WRONG_KEY
        return messages.OTHER_KEY if is_another else messages.NOT_SEALED, _NONE

    def on_notice(self, link: LinkId, body: bytes) -> None:
        raise WireError(CloseReason.UNEXPECTED, "a rank accepts no notice")

    def on_closed(self, link: LinkId) -> None:
        """Does nothing: no state is kept for a connection."""
