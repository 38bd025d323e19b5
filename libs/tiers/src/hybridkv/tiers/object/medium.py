"""Medium of one rank for an object store: writes packs and reads ranges of them.

The stores of one flush and one pack become one object. Adjacent loads are read as one range. A few threads send the
requests. A load succeeds only if header, checksum and seal match the bytes.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, Slot, Ticket
from hybridkv.tiers.digests import view_digest, view_digests
from hybridkv.tiers.object.directory_store import StoredFile
from hybridkv.tiers.object.format.record import (
    HEADER_BYTES,
    LARGEST_KEY_BYTES,
    PartPlace,
    check_header,
    check_seal,
    encode_header,
)
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.names import rank_name
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import ObjectSlot
from hybridkv.tiers.object.store import failure_of
from hybridkv.tiers.remote.medium import CLOSED, RemoteMedium
from hybridkv.tiers.threads import DaemonPool

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)

READ_BYTES = 16 << 20
"""Adjacent chunks are read together up to this size."""
BATCH_BYTES = 1 << 20
"""Chunks of a read are checked together up to this size."""
GAP_BYTES = 64 << 10
"""Chunks with a gap up to this size count as adjacent."""
NUM_THREADS = 4
"""Concurrent pack reads and writes of one rank."""
_ZEROS_BYTES = 64 << 10
_MAX_WRITTEN = 4096
"""Limit of the remembered names of written packs."""


@dataclass(slots=True, eq=False)
class _PackMove:
    ticket: Ticket
    key: Key
    slot: ObjectSlot
    views: list[memoryview]
    num_bytes: int
    """Size of the chunk."""
    end: int
    """Offset after the chunk in its pack, in bytes."""
    has_ended: bool = False
    """True after its completion. One thread at a time works on a move."""


class ObjectMedium(RemoteMedium):
    """A `TierMedium` for the slots of an `ObjectIndex`.

    Args:
        open_store: opens the store; called on a thread of the medium.
        seals: seals of the fleet.
        rank: rank of this medium.
        options: limits.
    """

    def __init__(self, open_store: Callable[[], Store], seals: Seals, rank: int, options: ObjectOptions) -> None:
        super().__init__(options.max_waiting)
        self._open_store = open_store
        self._store: Store | None = None
        self._opening = threading.Lock()
        self._seals = seals
        self._rank = rank
        self._options = options
        self._stores: dict[str, list[_PackMove]] = {}
        """Queued stores by pack, until `flush`."""
        self._written: OrderedDict[str, None] = OrderedDict()
        self._loads: list[_PackMove] = []
        """Queued loads, until `flush`."""
        self._pool = DaemonPool(NUM_THREADS, "hybridkv-object")

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        move = self._begun(ticket, key, slot, source, is_store=True)
        if move is not None:
            self._stores.setdefault(move.slot.pack, []).append(move)

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        move = self._begun(ticket, key, slot, destination, is_store=False)
        if move is not None:
            self._loads.append(move)

    def flush(self) -> None:
        """Start everything queued since the last call."""
        stores, self._stores = self._stores, {}
        loads, self._loads = self._loads, []
        if loads:
            self._submit(lambda _, moves: self._read_all(moves), "", loads)
        for pack, moves in stores.items():
            if pack in self._written:
                self._end_all(moves, Failure(FailureReason.IO, f"{pack} is written already"))
                continue
            self._written[pack] = None
            if len(self._written) > _MAX_WRITTEN:
                self._written.popitem(last=False)
            self._submit(self._write, pack, moves)

    def _begun(
        self, ticket: Ticket, key: Key, slot: Slot, buffers: Sequence[Buffer], *, is_store: bool
    ) -> _PackMove | None:
        views = self._begin(ticket, slot, buffers, is_store=is_store)
        if views is None:
            return None
        if not isinstance(slot, ObjectSlot) or not slot.pack or len(key) > LARGEST_KEY_BYTES:
            failure = Failure(FailureReason.IO, "the slot is not a place in a pack, or the key is too long")
            self._end(Completion(ticket, failure))
            return None
        num_bytes = slot.num_bytes
        return _PackMove(ticket, key, slot, views, num_bytes, slot.offset + HEADER_BYTES + num_bytes)

    def drain(self, timeout_s: float) -> bool:
        self.flush()
        return super().drain(timeout_s)

    def close(self) -> None:
        """End all operations. Operations that have not started fail with CLOSED. Requests that take longer than
        `close_timeout_s` are abandoned."""
        if self._is_closed:
            return
        self._is_closed = True
        for moves in (*self._stores.values(), self._loads):
            self._end_all(moves, CLOSED)
        self._stores, self._loads = {}, []
        self._pool.close(self._options.close_timeout_s)

    # On other threads.

    def _read_all(self, moves: list[_PackMove]) -> None:
        by_pack: dict[str, list[_PackMove]] = {}
        for move in moves:
            by_pack.setdefault(move.slot.pack, []).append(move)
        runs = [(pack, run) for pack, wanted in by_pack.items() for run in self._runs(wanted)]
        moves.clear()  # from here on, only the thread of its run ends a move: it writes the move's memory
        for pack, run in runs:
            self._submit(self._read, pack, run)

    def _runs(self, moves: list[_PackMove]) -> Iterator[list[_PackMove]]:
        """Runs of adjacent chunks in a pack, each within the limit of one read."""
        run: list[_PackMove] = []
        for move in sorted(moves, key=lambda each: each.slot.offset):
            if run and (
                not 0 <= move.slot.offset - run[-1].end <= GAP_BYTES or move.end - run[0].slot.offset > READ_BYTES
            ):
                yield run
                run = []
            run.append(move)
        if run:
            yield run

    def _submit(self, work: Callable[[str, list[_PackMove]], None], pack: str, moves: list[_PackMove]) -> None:
        def run() -> None:
            if self._is_closed:
                self._end_all(moves, CLOSED)
                return
            try:
                work(pack, moves)
            except BaseException as error:  # a bug, or a panic of obstore: each move must still end
                self._end_all(moves, Failure(FailureReason.IO, f"unexpected {type(error).__name__}"))
                logger.exception("a pack could not be moved")

        try:
            self._pool.submit(run)
        except (RuntimeError, MemoryError) as error:  # the pool is closed, or no thread can start
            self._end_all(moves, CLOSED if self._is_closed else failure_of(error, "begin"))

    def _end_move(self, move: _PackMove, completion: Completion) -> None:
        move.has_ended = True
        self._end(completion)

    def _end_all(self, moves: Sequence[_PackMove], failure: Failure) -> None:
        """Fail the moves that have not ended."""
        for move in moves:
            if not move.has_ended:
                self._end_move(move, Completion(move.ticket, failure))

    def _opened(self) -> Store:
        with self._opening:
            if self._store is None:
                self._store = self._open_store()
            return self._store

    def _write(self, pack: str, moves: list[_PackMove]) -> None:
        """Write one pack object. Places of chunks without a store are filled with zeros."""
        name = rank_name(pack, self._rank)
        moves.sort(key=lambda move: move.slot.offset)
        checksums: list[bytes] = []
        body: list[Buffer] = []
        end = 0
        try:
            for move in moves:
                place = PartPlace(name, self._rank, move.slot.offset)
                checksum = view_digest(move.views)
                body += [bytes(move.slot.offset - end)] if move.slot.offset > end else []
                body.append(encode_header(self._seals, place, move.key, checksum, move.num_bytes, move.views))
                body += move.views
                checksums.append(checksum)
                end = move.end
            self._opened().put(name, body, use_multipart=False)
        except Exception as error:
            self._end_all(moves, failure_of(error, f"storing {name}"))
            return
        for move, checksum in zip(moves, checksums, strict=True):
            self._end_move(move, Completion(move.ticket, checksum=checksum))

    def _read(self, pack: str, run: list[_PackMove]) -> None:
        """Read one range. Wrong or missing chunks are read once more with another range, because a proxy or cache
        on the way may be faulty."""
        bad = self._read_from(pack, run, run[0].slot.offset, is_last=False)
        if bad:
            first = 0 if bad[-1].end <= READ_BYTES else bad[0].slot.offset
            self._read_from(pack, bad, first, is_last=True)

    def _read_from(self, pack: str, run: list[_PackMove], first: int, *, is_last: bool) -> list[_PackMove]:
        """Read a range. Returns the chunks to read again; all others have ended."""
        name = rank_name(pack, self._rank)
        left, bad = list(run), []
        try:
            answer = self._opened().get(name, options={"range": (first, max(move.end for move in run))})
            stream = answer if isinstance(answer, StoredFile) else RangeStream(answer.stream(min_chunk_size=1), first)
            while left:
                batch = _first_batch(left)
                completions = self._read_batch(stream, name, batch)
                del left[: len(batch)]
                ended = []
                for move, completion in zip(batch, completions, strict=True):
                    if completion.failure is None or is_last:
                        move.has_ended = True
                        ended.append(completion)
                    else:
                        bad.append(move)
                self._end(*ended)
        except Exception as error:
            if not isinstance(error, FileNotFoundError) and _is_beyond(error):
                error = FileNotFoundError(str(error))
            if isinstance(error, FileNotFoundError) and not is_last:
                return bad + left
            self._end_all(left, failure_of(error, f"reading {name}"))
        return bad

    def _read_batch(self, stream: RangeStream | StoredFile, name: str, batch: Sequence[_PackMove]) -> list[Completion]:
        """Read chunks in order of their offsets, and check each chunk."""
        first = at = batch[0].slot.offset
        headers = [memoryview(bytearray(HEADER_BYTES)) for _ in batch]
        views: list[memoryview] = []
        for move, header in zip(batch, headers, strict=True):
            if move.slot.offset > at:
                views.append(memoryview(bytearray(move.slot.offset - at)))
            views += [header, *move.views]
            at = move.end
        stream.skip_to(first)
        end = first + stream.read_into(views)
        checksums = view_digests([move.views for move in batch])
        return [
            self._checked(move, name, header, checksum, end)
            for move, header, checksum in zip(batch, headers, checksums, strict=True)
        ]

    def _checked(self, move: _PackMove, name: str, header: memoryview, checksum: bytes, end: int) -> Completion:
        """Completion of a chunk that was read. `end`: offset after the last byte that was read."""
        place = PartPlace(name, self._rank, move.slot.offset)
        head = bytes(header[: max(0, end - place.offset)])
        failure: Failure | None = None
        expected = check_header(head, place, move.key, move.num_bytes)
        if isinstance(expected, Failure):
            failure = expected
        elif end < move.end:
            failure = Failure(FailureReason.MISSING, f"{name} ends too early")
        else:
            failure = check_seal(self._seals, head, place, move.views)
            if failure is None and checksum != expected:
                text = f"the bytes of {move.key.hex()} are not those that were stored"
                failure = Failure(FailureReason.CHECKSUM, text)
        return Completion(move.ticket, failure, None if failure else checksum)


def _first_batch(moves: Sequence[_PackMove]) -> list[_PackMove]:
    """Leading chunks, up to `BATCH_BYTES`, at least one."""
    batch: list[_PackMove] = []
    for move in moves:
        if batch and move.end - batch[0].slot.offset > BATCH_BYTES:
            break
        batch.append(move)
    return batch


class RangeStream:
    """Reader of a streamed range."""

    def __init__(self, chunks: Iterable[Buffer], at: int) -> None:
        self._chunks = iter(chunks)
        self._at = at
        self._rest = memoryview(b"")

    def _next(self, num_bytes: int) -> memoryview:
        """Up to `num_bytes` bytes; empty at the end."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return self._rest
            self._rest = memoryview(chunk).cast("B")
        taken, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        self._at += len(taken)
        return taken

    def skip_to(self, offset: int) -> None:
        while self._at < offset and self._next(offset - self._at):
            pass

    @property
    def offset(self) -> int:
        """Offset of the next byte."""
        return self._at

    def skip_zeros(self) -> None:
        """Skip to the next byte that is not zero."""
        while True:
            self._next(0)  # fetches a piece if none is left
            piece = bytes(self._rest[:_ZEROS_BYTES])
            num_zeros = len(piece) - len(piece.lstrip(b"\0"))
            self._next(num_zeros)
            if num_zeros < len(piece) or not piece:
                return

    def read(self, num_bytes: int) -> bytes:
        """Exactly `num_bytes` bytes, or fewer at the end."""
        data = bytearray()
        while len(data) < num_bytes and (taken := self._next(num_bytes - len(data))):
            data += taken
        return bytes(data)

    def read_into(self, views: Sequence[memoryview]) -> int:
        """Fill byte views in order. Returns the number of bytes read: less than the room if the range ends first."""
        num_bytes = 0
        for view in views:
            at = 0
            while at < len(view) and (taken := self._next(len(view) - at)):
                view[at : at + len(taken)] = taken
                at += len(taken)
            num_bytes += at
        return num_bytes


def _is_beyond(error: BaseException) -> bool:
    """True if an error means that the range begins after the end of the object."""
    text = str(error).lower()
    return "range" in text and ("416" in text or "invalid" in text or "satisfiable" in text or "larger" in text)
