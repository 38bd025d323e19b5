"""Records of the disk tier and their model in Python: equal answers, segments, log and order after every call.

HYBRIDKV_TWINS_FACTOR multiplies the length of the comparison, with calls drawn at random.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from examples import examples

from hybridkv.tiers import Extends, Refusal, TierProtocolError
from hybridkv.tiers.disk.format.layout import PAGE_BYTES, SEGMENT_HEAD_BYTES
from hybridkv.tiers.disk.index.change_log import ChangeLog, SnapshotCancelledError
from hybridkv.tiers.disk.index.found import FoundRecord, FoundRecords
from hybridkv.tiers.disk.index.records import RecordTable, cost_of
from hybridkv.tiers.disk.index.segments import Segment, SegmentStage, SegmentTable
from hybridkv.tiers.disk.options import DiskSizes
from hybridkv.tiers.ledger import KeyState
from kits.plain_records import PlainRecordTable

FACTOR = int(os.environ.get("HYBRIDKV_TWINS_FACTOR", "1"))
SEEDS = [Random().randrange(1 << 30) for _ in range(8)] if FACTOR > 1 else list(range(8))
STEPS = examples(2_000) * FACTOR
SIZES = [1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES]
NUM_SEGMENTS, SEGMENT_BYTES = 6, SEGMENT_HEAD_BYTES + 24 * PAGE_BYTES
KEYS = [bytes([number]) * (300 if number % 50 == 0 else 40) for number in range(60)]
"""Some are longer than an entry has room for."""


class TableBench:
    """Record table over segments. A new segment is ready whenever one is full."""

    def __init__(self, make: Callable[..., PlainRecordTable], max_records: int) -> None:
        sizes = SimpleNamespace(
            segment_room_bytes=SEGMENT_BYTES - SEGMENT_HEAD_BYTES,
            usable_bytes=NUM_SEGMENTS * (SEGMENT_BYTES - SEGMENT_HEAD_BYTES),
            max_records=max_records,
            num_ranks=1,
            data_bytes=1 << 40,
            segment_bytes=SEGMENT_BYTES,
        )
        self.segments = SegmentTable(cast(DiskSizes, sizes), 0)
        self.log = ChangeLog()
        self.table = make(self.segments, self.log, cast(DiskSizes, sizes))
        self.table.watch()
        self.add_segments()

    def add_segments(self) -> None:
        while len(self.segments.ready) < 3:
            self.segments.add(Segment(self.segments.free_number(), SEGMENT_BYTES, 0))
            self.segments.take_number()

    def reserve(self, key: bytes, num_bytes: int, extends: Extends = ()) -> object:
        cost = cost_of(num_bytes)
        refusal = self.table.reserve_refusal(key, cost, extends)
        if refusal is not None:
            return self.table.count_refusal(refusal)
        self.table.make_room(cost, extends=extends)
        self.add_segments()
        return self.table.reserve(key, num_bytes, cost, extends)

    def move(self, number: int) -> object:
        """Move records as compaction does after its copy has ended."""
        segment = self.segments.by_number.get(number)
        if segment is None or not segment.is_candidate:
            return None
        moved = self.table.movable_in(segment)
        for record in moved:
            self.add_segments()
            self.table.relocate(record, self.segments.append(record.cost))
        return [record.key for record in moved]

    def drop_dead(self) -> list[int]:
        numbers = sorted(self.segments.dead)
        for number in numbers:
            self.segments.remove(self.segments.by_number[number])
            self.table.drop_segment(number)
        return numbers

    def lose(self, number: int) -> None:
        segment = self.segments.by_number.get(number)
        if segment is not None and segment.stage is SegmentStage.FULL:
            self.table.withdraw_in(segment)

    def snapshot(self) -> object:
        cut = self.log.cut()
        found = self.table.source().committed(cut)
        cut.is_cancelled = True  # nothing writes it, so that later changes stay in the same file
        rows = list(zip(found.keys[:], found.addresses.tolist(), found.payload_bytes.tolist(), strict=True))
        assert [found.keys[place] for place in range(len(found.keys))] == [row[0] for row in rows]
        assert list(found.last(len(rows) // 2).keys[:]) == [row[0] for row in rows[len(rows) - len(rows) // 2 :]]
        return rows

    def state(self) -> dict[str, object]:
        table, segments = self.table, self.segments
        known = [table.find(key) for key in KEYS]
        counted = {
            number: (each.stage, each.live_bytes, each.num_holding, each.num_being_written, each.end_offset)
            for number, each in segments.by_number.items()
        }
        cheapest = segments.candidates.cheapest()
        return {
            "known": [record and (record.address, record.payload_bytes, record.cost, record.state, record.num_pins)
                      for record in known],
            "answers": [table.lookup(key) for key in KEYS],
            "lacks": [table.lacks(key) for key in KEYS],
            "order": table.eviction_order(),
            "segments": counted,
            "dead": sorted(segments.dead),
            "being written": sorted(segments.being_written),
            "cheapest": cheapest and cheapest.live_bytes,
            "counts": (table.num_keys, len(table.reserved()), len(table.in_use()), table.used_bytes, table.generation),
            "tally": table.take_counts(),
            "changes": table.take_changes(),
            "log": self.log.take(),
            "in use": sorted((each.key, each.address) for each in table.in_use()),
            "reserved": sorted((each.key, each.address) for each in table.reserved()),
            "has evictable": table.has_evictable,
            "movable": {
                number: [each.key for each in table.movable_in(segment)]
                for number, segment in segments.by_number.items()
            },
        }  # fmt: skip


def called(bench: TableBench, verb: str, arguments: tuple[Any, ...]) -> object:
    """Result of a call, or its error."""
    subject = bench if hasattr(TableBench, verb) else bench.table
    try:
        return getattr(subject, verb)(*arguments)
    except TierProtocolError as error:
        return str(error)


def some(random: Random) -> list[bytes]:
    return random.choices(KEYS, k=random.randint(1, 12))


def drawn(random: Random) -> tuple[str, tuple[Any, ...]]:
    verb = random.choice(
        ["reserve"] * 6
        + ["commit"] * 4
        + ["commit_all", "abort", "withdraw", "touch", "evict"]
        + ["pin", "pin_all", "pin_all", "unpin", "unpin_all", "unpin_all", "leading", "last_held", "any_pending"]
        + ["move", "move", "drop_dead", "drop_dead", "lose"]
    )
    match verb:
        case "reserve":
            return verb, (
                random.choice(KEYS),
                random.choice(SIZES),
                tuple(random.choices(KEYS, k=random.randint(0, 2))),
            )
        case "touch":
            keys = some(random)
            return verb, (keys, [tuple(random.choices(KEYS, k=random.randint(0, 2))) for _ in keys])
        case "commit" | "abort" | "withdraw" | "pin" | "unpin":
            return verb, (random.choice(KEYS),)
        case "evict":
            return "make_room", (random.choice([0, 8, 40]) * PAGE_BYTES, random.choice([0, 1, 20]))
        case "move":
            return verb, (random.randint(0, 400),)
        case "lose":
            return verb, (random.randint(0, 4000),)
        case "drop_dead":
            return verb, ()
        case "leading" | "last_held" | "any_pending":
            return verb, (some(random),)
        case _:
            return verb, (some(random),)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_leave_equal_results_and_states(seed: int) -> None:
    random = Random(seed)
    max_records = random.choice([20, 1000])
    benches = [TableBench(make, max_records) for make in (PlainRecordTable, RecordTable)]
    live: list[int] = []
    for step in range(STEPS):
        verb, arguments = drawn(random)
        if verb == "move" and live:
            arguments = (random.choice(live),)
        if verb in ("pin_all", "unpin_all") and random.random() < 0.7:
            # Draw keys that can be pinned or unpinned: random keys seldom all can.
            in_use = [each.key for each in benches[0].table.in_use() if each.num_pins]
            among = in_use if verb == "unpin_all" else benches[0].table.eviction_order()
            arguments = (random.sample(among, min(len(among), random.randint(1, 6))),)
        if random.random() < 0.002:
            verb, arguments = "forget_all", ()
        answers = [called(bench, verb, arguments) for bench in benches]
        if verb == "withdraw":
            answers = [record and (record.key, record.address, record.payload_bytes) for record in cast(Any, answers)]
        assert answers[0] == answers[1], (seed, step, verb, arguments)
        states = [bench.state() for bench in benches]
        for name, plain in states[0].items():
            assert plain == states[1][name], (seed, step, verb, arguments, name)
        live = list(benches[0].segments.by_number)
        if step % 50 == 0:
            rows = [cast(list[Any], bench.snapshot()) for bench in benches]
            assert sorted(rows[0]) == sorted(rows[1])
            for bench in benches:
                bench.log.take()
    closed = [bench.table for bench in benches]
    for table in closed:
        table.close()
    assert [table.reserve_refusal(b"new", PAGE_BYTES) for table in closed] == [Refusal.CLOSED] * 2


@pytest.mark.parametrize("make", [PlainRecordTable, RecordTable])
def test_a_snapshot_lists_the_least_recently_used_first(make: Callable[..., PlainRecordTable]) -> None:
    bench = TableBench(make, 1000)
    for key in KEYS[:20]:
        bench.reserve(key, 1)
        bench.table.commit(key)
    bench.table.touch(KEYS[5:8])
    bench.table.pin_all(KEYS[:1])
    bench.table.unpin_all(KEYS[:1])
    rows = cast(list[Any], bench.snapshot())
    assert [row[0] for row in rows] == [*KEYS[1:5], *KEYS[8:20], *KEYS[5:8], KEYS[0]] == bench.table.eviction_order()


def test_a_snapshot_lists_a_key_before_the_one_that_it_extends() -> None:
    bench = TableBench(RecordTable, 1000)
    for number, key in enumerate(KEYS[:8]):
        # Two alternating paths; the first one is used last.
        bench.reserve(key, 1, (KEYS[number - 2],) if number >= 2 else ())
        bench.table.commit(key)
    bench.table.touch([KEYS[6]])
    rows = cast(list[Any], bench.snapshot())
    expected = [KEYS[number] for number in (7, 5, 3, 1, 6, 4, 2, 0)]
    assert [row[0] for row in rows] == expected == bench.table.eviction_order()


def test_a_snapshot_misses_no_key_that_stays_during_the_walk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pins, uses and evictions between two steps of the walk move entries out of the chain being walked."""
    for seed in SEEDS:
        random = Random(seed)
        bench = TableBench(RecordTable, 1000)
        for key in KEYS:
            bench.reserve(key, 1)
            bench.table.commit(key)
        always = set(KEYS[::2])
        monkeypatch.setattr("hybridkv.tiers.disk.index.snapshot_source.ENTRIES_AT_A_TIME", 3)

        def meanwhile(
            _: float, bench: TableBench = bench, random: Random = random, always: set[bytes] = always
        ) -> None:
            for _ in range(4):
                key = random.choice(KEYS)
                match random.randint(0, 4):
                    case 0:
                        bench.table.touch([key])
                    case 1:
                        bench.table.pin(key)
                    case 2:
                        record = bench.table.find(key)
                        if record is not None and record.num_pins:
                            bench.table.unpin(key)
                    case _ if key not in always:
                        bench.table.withdraw(key)

        monkeypatch.setattr("hybridkv.tiers.disk.index.snapshot_source.time.sleep", meanwhile)
        found = bench.table.source().committed(bench.log.cut())
        named = found.keys[:]
        assert always <= set(named) and len(named) == len(set(named))
        for key, address in zip(named, found.addresses.tolist(), strict=True):
            record = bench.table.find(key)
            assert record is None or record.address == address


def test_a_snapshot_planned_before_a_clear_reads_the_cleared_keys() -> None:
    bench = TableBench(RecordTable, 1000)
    for key in KEYS[:9]:
        bench.reserve(key, 1)
        bench.table.commit(key)
    bench.table.pin(KEYS[3])
    source, later = bench.table.source(), bench.log.cut()
    bench.table.forget_all()
    assert all(map(bench.table.lacks, KEYS))
    assert set(source.committed(later).keys[:]) == set(KEYS[:9])


def test_a_snapshot_is_cancelled_when_another_is_planned() -> None:
    bench = TableBench(RecordTable, 1000)
    first, cut = bench.table.source(), bench.log.cut()
    second = bench.table.source()
    with pytest.raises(SnapshotCancelledError):
        first.committed(cut)
    assert not len(second.committed(cut).keys)


@pytest.mark.parametrize("make", [PlainRecordTable, RecordTable])
@pytest.mark.parametrize("max_records", [5, 100])
def test_records_restored_beyond_the_bound_are_evicted_by_lru(
    make: Callable[..., PlainRecordTable], max_records: int
) -> None:
    first = TableBench(make, 100)
    for key in KEYS[:12]:
        first.reserve(key, PAGE_BYTES)
        first.table.commit(key)
    found = FoundRecords()
    for key in first.table.eviction_order():
        record = first.table.find(key)
        assert record is not None
        found.put(FoundRecord(key, record.address, record.payload_bytes))
    bench = TableBench(make, max_records)
    bench.segments.by_number.clear()
    bench.segments.ready.clear()
    for number in first.segments.by_number:
        segment = Segment(number, SEGMENT_BYTES, 0)
        segment.stage = SegmentStage.FULL
        bench.segments.add(segment)
    bench.table.restore(found)
    bench.table.make_room(0, 0)
    kept = KEYS[:12][-min(12, max_records) :]
    assert bench.table.eviction_order() == kept
    counts = bench.table.take_counts()
    assert counts.evictions == 12 - len(kept) and counts.evicted_bytes == counts.evictions * cost_of(PAGE_BYTES)
    live_bytes = sum(segment.live_bytes for segment in bench.segments.by_number.values())
    assert live_bytes == bench.table.used_bytes == len(kept) * cost_of(PAGE_BYTES)
    changes, _ = bench.log.take()
    assert len(changes) == counts.evictions
    assert all(record.state is KeyState.COMMITTED for record in map(bench.table.find, kept) if record)


@pytest.mark.parametrize("make", [PlainRecordTable, RecordTable])
def test_the_last_of_two_restored_records_of_a_key_counts(make: Callable[..., PlainRecordTable]) -> None:
    bench = TableBench(make, 100)
    bench.segments.by_number.clear()
    bench.segments.ready.clear()
    segment = Segment(0, SEGMENT_BYTES, 0)
    segment.stage = SegmentStage.FULL
    bench.segments.add(segment)
    keys = [KEYS[0], KEYS[1], KEYS[0]]
    addresses = [SEGMENT_HEAD_BYTES + place * cost_of(PAGE_BYTES) for place in range(3)]
    bench.table.restore(FoundRecords(keys, addresses, [PAGE_BYTES] * 3))
    assert bench.table.num_keys == 2 and bench.table.eviction_order() == KEYS[:2]
    record = bench.table.find(KEYS[0])
    assert record is not None and record.address == addresses[2]
    assert segment.live_bytes == bench.table.used_bytes == 2 * cost_of(PAGE_BYTES)
    assert bench.table.take_counts().invalidations == 0
