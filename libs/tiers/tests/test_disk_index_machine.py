"""State machine of a disk index: under any calls, restarts and crashes, found chunks were committed, have their own
bytes, and fit the capacity.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import disk_store
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hybridkv.planner import LookupResult
from hybridkv.tiers import Refusal, Slot, Ticket, TierProtocolError
from hybridkv.tiers.disk import DiskOptions, Fsync
from hybridkv.tiers.disk.format.layout import record_bytes

NUM_RANKS = 2
NUM_KEYS = 8
SEGMENT_BYTES = 8192 + 5 * 8192
OPTIONS = DiskOptions(
    capacity_bytes=7 * NUM_RANKS * SEGMENT_BYTES + 290_000,
    segment_bytes=SEGMENT_BYTES,
    fsync=Fsync.NONE,
    max_in_flight=1,
    batch_bytes=1 << 16,
    max_quarantined=256,
    snapshot_interval_s=10.0,
    changes_interval_s=0.0,
)

keys = st.sampled_from([b"key %d" % number for number in range(NUM_KEYS)])
sizes = st.integers(min_value=0, max_value=SEGMENT_BYTES)
small_sizes = st.integers(min_value=1, max_value=3 * 4096)


@dataclass
class KnownChunk:
    """Model of one key."""

    slot: Slot
    seed: int
    is_stored: bool = False
    is_reserved: bool = True
    is_doomed: bool = False
    num_pins: int = 0


def chunk_bytes(seed: int, rank: int, num_bytes: int) -> bytes:
    return (b"%d of rank %d, " % (seed, rank) * (num_bytes // 8 + 1))[:num_bytes]


class DiskIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.path = self.directory / "store"
        self.clock = disk_store.Clock()
        self.chunks: dict[bytes, KnownChunk] = {}
        self.evicted: dict[bytes, KnownChunk] = {}
        self.num_stores = 0
        self.open()

    def open(self) -> None:
        self.index = disk_store.make_index(self.path, OPTIONS, clock=self.clock, tensor_parallel_size=NUM_RANKS)
        self.media = [
            disk_store.make_medium(self.path, OPTIONS, rank=rank, tensor_parallel_size=NUM_RANKS)
            for rank in range(NUM_RANKS)
        ]

    def teardown(self) -> None:
        for medium in self.media:
            medium.close()
        self.index.close()
        shutil.rmtree(self.directory)

    def notice_evictions(self) -> None:
        """Move evicted keys to `evicted`; check that the index counted as many."""
        gone = [
            key
            for key, chunk in self.chunks.items()
            if not (chunk.is_reserved or chunk.is_doomed) and self.index.lookup(key) is LookupResult.MISS
        ]
        for key in gone:
            self.evicted[key] = self.chunks.pop(key)
            assert not self.evicted[key].num_pins, "a pinned chunk was evicted"
        assert self.index.take_counts().evictions == len(gone)

    @rule(key=keys, num_bytes=sizes)
    def reserve(self, key: bytes, num_bytes: int) -> None:
        if num_bytes == 0:
            assert self.is_refused(lambda: self.index.reserve(key, num_bytes))
            return
        self.notice_evictions()
        was_known = key in self.chunks
        slot = self.index.reserve(key, num_bytes)
        assert isinstance(slot, Slot) or slot in (Refusal.NO_ROOM, Refusal.TOO_LARGE, Refusal.PRESENT)
        assert (slot is Refusal.PRESENT) == was_known
        if slot is Refusal.NO_ROOM:
            assert any(chunk.is_reserved or chunk.num_pins for chunk in self.chunks.values())
        if isinstance(slot, Slot):
            assert slot.num_bytes == num_bytes
            self.num_stores += 1
            self.chunks[key] = KnownChunk(slot, self.num_stores)
        self.notice_evictions()

    @rule(key=keys, stores_all=st.booleans())
    def store(self, key: bytes, stores_all: bool) -> None:
        chunk = self.chunks.get(key)
        if chunk is None or not chunk.is_reserved or chunk.is_stored:
            return
        for rank, medium in enumerate(self.media if stores_all else self.media[:1]):
            medium.store(Ticket(1), key, chunk.slot, [chunk_bytes(chunk.seed, rank, chunk.slot.num_bytes)])
            [completion] = disk_store.finish(medium)
            assert completion.failure is None
        chunk.is_stored = stores_all

    @rule(key=keys, num_bytes=small_sizes)
    def put(self, key: bytes, num_bytes: int) -> None:
        """Reserve, store and commit in one step."""
        self.reserve(key, num_bytes)
        self.store(key, stores_all=True)
        if key in self.chunks and self.chunks[key].is_reserved:
            self.commit(key)

    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Put many chunks, so that segments are abandoned and compacted."""
        for number in data.draw(st.lists(st.integers(0, NUM_KEYS - 1), min_size=5, max_size=25)):
            key = b"key %d" % number
            if key in self.chunks and not self.chunks[key].num_pins:
                self.invalidate(key)
            self.put(key, 4096)

    @rule(key=keys)
    def commit(self, key: bytes) -> None:
        chunk = self.chunks.get(key)
        if chunk is None or not chunk.is_reserved:
            assert self.is_refused(lambda: self.index.commit(key))
            return
        if not chunk.is_stored:
            return
        assert self.index.commit(key) is not chunk.is_doomed
        if chunk.is_doomed:
            del self.chunks[key]
        chunk.is_reserved = False

    @rule(key=keys)
    def abort(self, key: bytes) -> None:
        chunk = self.chunks.get(key)
        if chunk is None or not chunk.is_reserved:
            assert self.is_refused(lambda: self.index.abort(key))
            return
        self.index.abort(key)
        del self.chunks[key]
        self.evicted.pop(key, None)

    @rule(key=keys)
    def invalidate(self, key: bytes) -> None:
        self.notice_evictions()
        chunk = self.chunks.get(key)
        assert self.index.invalidate(key) is (chunk is not None and not chunk.is_doomed)
        self.doom(key)

    def doom(self, key: bytes) -> None:
        chunk = self.chunks.get(key)
        if chunk is not None:
            self.evicted.pop(key, None)
        if chunk is not None and (chunk.is_reserved or chunk.num_pins):
            chunk.is_doomed = True
        elif chunk is not None:
            del self.chunks[key]

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        chunk = self.chunks.get(key)
        slot = self.index.pin(key)
        is_offered = chunk is not None and not chunk.is_reserved and not chunk.is_doomed
        assert (slot is not None) == is_offered
        if chunk is not None and slot is not None:
            assert not chunk.num_pins or slot == chunk.slot, "a pinned chunk was moved"
            chunk.slot = slot
            chunk.num_pins += 1
            self.load(key, chunk)

    def load(self, key: bytes, chunk: KnownChunk) -> None:
        for rank, medium in enumerate(self.media):
            destination = bytearray(chunk.slot.num_bytes)
            medium.load(Ticket(2), key, chunk.slot, [destination])
            [completion] = disk_store.finish(medium)
            assert completion.failure is None, completion.failure
            assert destination == chunk_bytes(chunk.seed, rank, chunk.slot.num_bytes)

    @rule(key=keys)
    def unpin(self, key: bytes) -> None:
        chunk = self.chunks.get(key)
        if chunk is None or not chunk.num_pins:
            assert self.is_refused(lambda: self.index.unpin(key))
            return
        self.load(key, chunk)
        self.index.unpin(key)
        chunk.num_pins -= 1
        if chunk.is_doomed and not chunk.num_pins:
            del self.chunks[key]

    @rule(touched=st.lists(keys, max_size=4))
    def touch(self, touched: list[bytes]) -> None:
        self.index.touch(touched)

    @rule()
    def clear(self) -> None:
        self.notice_evictions()
        offered = [key for key, chunk in self.chunks.items() if not chunk.is_doomed]
        assert self.index.clear() == len(offered)
        for key in offered:
            self.doom(key)
        self.evicted.clear()

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def restart(self) -> None:
        self.notice_evictions()
        self.index.close()
        self.reopen()

    @rule()
    def crash(self) -> None:
        """As for a killed process: nothing more is written, and the lock is free."""
        self.notice_evictions()
        self.index._namespace.close()
        self.reopen()

    def reopen(self) -> None:
        for medium in self.media:
            medium.close()
        self.open()
        # A record written by every rank is whole, even if it was not committed.
        whole = {key: chunk for key, chunk in self.chunks.items() if chunk.is_stored and not chunk.is_doomed}
        offered = {b"key %d" % n for n in range(NUM_KEYS) if self.index.lookup(b"key %d" % n) is LookupResult.HIT}
        assert len(whole.keys() - offered) <= self.index.take_counts().evictions
        # An evicted chunk may come back after a crash. A withdrawn one may not.
        former = self.evicted | whole
        assert offered <= former.keys()
        self.evicted = {key: chunk for key, chunk in former.items() if key not in offered}
        self.chunks = {key: former[key] for key in offered}
        for key, chunk in self.chunks.items():
            chunk.is_reserved, chunk.num_pins = False, 0
            slot = self.index.pin(key)
            assert slot is not None
            chunk.slot = slot
            self.load(key, chunk)
            self.index.unpin(key)

    def is_refused(self, call: object) -> bool:
        assert callable(call)
        try:
            call()
        except TierProtocolError:
            return True
        return False

    @invariant()
    def index_answers_equal_the_model(self) -> None:
        self.notice_evictions()
        for number in range(NUM_KEYS):
            key = b"key %d" % number
            chunk = self.chunks.get(key)
            expected = LookupResult.MISS
            if chunk is not None and not chunk.is_doomed:
                expected = LookupResult.PENDING if chunk.is_reserved else LookupResult.HIT
            assert self.index.lookup(key) is expected
        assert self.index.num_keys == sum(not chunk.is_doomed for chunk in self.chunks.values())
        assert self.index.used_bytes == sum(record_bytes(chunk.slot.num_bytes) for chunk in self.chunks.values())

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        assert self.index.used_bytes <= self.index.capacity_bytes
        assert disk_store.disk_bytes(self.path) <= OPTIONS.capacity_bytes

    @invariant()
    def segment_queues_equal_a_search_of_all_segments(self) -> None:
        table = self.index._segments
        segments = table.by_number.values()
        found = {
            number for number, segment in table.sealable.items() if segment.epoch == self.index._maintenance.state.epoch
        }
        assert found == {
            segment.number
            for segment in segments
            if segment.is_sealable and segment.epoch == self.index._maintenance.state.epoch
        }
        assert set(table.being_written) == {segment.number for segment in segments if segment.num_being_written}
        candidates = [segment for segment in segments if segment.is_candidate]
        assert set(table.dead) == {segment.number for segment in candidates if not segment.live_bytes}
        cheapest = table.candidates.cheapest()
        fewest = min((segment.kept_bytes for segment in candidates), default=None)
        assert (None if cheapest is None else cheapest.kept_bytes) == fewest

    @invariant()
    def slots_in_use_do_not_overlap(self) -> None:
        places = sorted(
            (chunk.slot.first_offset, chunk.slot.first_offset + record_bytes(chunk.slot.num_bytes))
            for chunk in self.chunks.values()
            if chunk.is_reserved or chunk.num_pins
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


DiskIndexMachine.TestCase.settings = settings(max_examples=examples(120, 20), stateful_step_count=60, deadline=None)
TestDiskIndexMachine = DiskIndexMachine.TestCase
