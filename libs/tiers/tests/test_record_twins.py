"""The disk's records and their model in Python: every call answers alike, and leaves segments, log and order alike.

HYBRIDKV_TWINS_FACTOR makes the comparison so many times longer, with calls that are drawn anew.
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
"""Some of them longer than an entry has room for."""


class World:
    """A table over segments of which a new one is there whenever one is full."""

    def __init__(self, make: Callable[..., PlainRecordTable], max_records: int) -> None:
        sizes = SimpleNamespace(
            room_bytes=SEGMENT_BYTES - SEGMENT_HEAD_BYTES,
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
        refusal = self.table.why_not(key, cost, extends)
        if refusal is not None:
            return self.table.count_refusal(refusal)
        self.table.make_room(cost, extends=extends)
        self.add_segments()
        return self.table.reserve(key, num_bytes, cost, extends)

    def move(self, number: int) -> object:
        """What compaction does, with a copy that has ended."""
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
        cut.is_cancelled = True  # nobody writes it, so what follows is no other file's
        rows = list(zip(found.keys[:], found.addresses.tolist(), found.payload_bytes.tolist(), strict=True))
        assert [found.keys[place] for place in range(len(found.keys))] == [row[0] for row in rows]
        assert list(found.last(len(rows) // 2).keys[:]) == [row[0] for row in rows[len(rows) - len(rows) // 2 :]]
        return rows

    def state(self) -> dict[str, object]:
        table, segments = self.table, self.segments
        known = [table.find(key) for key in KEYS]
        counted = {
            number: (each.stage, each.live_bytes, each.num_used, each.num_written, each.end_offset)
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
            "written": sorted(segments.written),
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


def called(world: World, verb: str, arguments: tuple[Any, ...]) -> object:
    """What a call answers, or how it fails."""
    subject = world if hasattr(World, verb) else world.table
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
def test_every_call_answers_alike_and_leaves_the_same_behind(seed: int) -> None:
    random = Random(seed)
    max_records = random.choice([20, 1000])
    worlds = [World(make, max_records) for make in (PlainRecordTable, RecordTable)]
    live: list[int] = []
    for step in range(STEPS):
        verb, arguments = drawn(random)
        if verb == "move" and live:
            arguments = (random.choice(live),)
        if verb in ("pin_all", "unpin_all") and random.random() < 0.7:
            # Of what can be pinned or unpinned: by chance alone seldom all of several.
            in_use = [each.key for each in worlds[0].table.in_use() if each.num_pins]
            among = in_use if verb == "unpin_all" else worlds[0].table.eviction_order()
            arguments = (random.sample(among, min(len(among), random.randint(1, 6))),)
        if random.random() < 0.002:
            verb, arguments = "forget_all", ()
        answers = [called(world, verb, arguments) for world in worlds]
        if verb == "withdraw":
            answers = [record and (record.key, record.address, record.payload_bytes) for record in cast(Any, answers)]
        assert answers[0] == answers[1], (seed, step, verb, arguments)
        states = [world.state() for world in worlds]
        for name, plain in states[0].items():
            assert plain == states[1][name], (seed, step, verb, arguments, name)
        live = list(worlds[0].segments.by_number)
        if step % 50 == 0:
            rows = [cast(list[Any], world.snapshot()) for world in worlds]
            assert sorted(rows[0]) == sorted(rows[1])
            for world in worlds:
                world.log.take()
    closed = [world.table for world in worlds]
    for table in closed:
        table.close()
    assert [table.why_not(b"new", PAGE_BYTES) for table in closed] == [Refusal.CLOSED] * 2


@pytest.mark.parametrize("make", [PlainRecordTable, RecordTable])
def test_a_snapshot_names_what_was_used_longest_ago_first(make: Callable[..., PlainRecordTable]) -> None:
    world = World(make, 1000)
    for key in KEYS[:20]:
        world.reserve(key, 1)
        world.table.commit(key)
    world.table.touch(KEYS[5:8])
    world.table.pin_all(KEYS[:1])
    world.table.unpin_all(KEYS[:1])
    rows = cast(list[Any], world.snapshot())
    assert [row[0] for row in rows] == [*KEYS[1:5], *KEYS[8:20], *KEYS[5:8], KEYS[0]] == world.table.eviction_order()


def test_a_snapshot_names_a_key_before_the_one_that_it_extends() -> None:
    world = World(RecordTable, 1000)
    for number, key in enumerate(KEYS[:8]):
        # Two paths in turns, of which the first one is used last.
        world.reserve(key, 1, (KEYS[number - 2],) if number >= 2 else ())
        world.table.commit(key)
    world.table.touch([KEYS[6]])
    rows = cast(list[Any], world.snapshot())
    expected = [KEYS[number] for number in (7, 5, 3, 1, 6, 4, 2, 0)]
    assert [row[0] for row in rows] == expected == world.table.eviction_order()


def test_a_snapshot_misses_nothing_that_is_there_all_the_time_whatever_happens_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pins, uses and evictions between two steps of the walk, in which entries leave the chain that is looked at."""
    for seed in SEEDS:
        random = Random(seed)
        world = World(RecordTable, 1000)
        for key in KEYS:
            world.reserve(key, 1)
            world.table.commit(key)
        always = set(KEYS[::2])
        monkeypatch.setattr("hybridkv.tiers.disk.index.snapshot_source.ENTRIES_AT_A_TIME", 3)

        def meanwhile(_: float, world: World = world, random: Random = random, always: set[bytes] = always) -> None:
            for _ in range(4):
                key = random.choice(KEYS)
                match random.randint(0, 4):
                    case 0:
                        world.table.touch([key])
                    case 1:
                        world.table.pin(key)
                    case 2:
                        record = world.table.find(key)
                        if record is not None and record.num_pins:
                            world.table.unpin(key)
                    case _ if key not in always:
                        world.table.withdraw(key)

        monkeypatch.setattr("hybridkv.tiers.disk.index.snapshot_source.time.sleep", meanwhile)
        found = world.table.source().committed(world.log.cut())
        named = found.keys[:]
        assert always <= set(named) and len(named) == len(set(named))
        for key, address in zip(named, found.addresses.tolist(), strict=True):
            record = world.table.find(key)
            assert record is None or record.address == address


def test_what_was_forgotten_is_still_read_by_a_snapshot_that_was_planned_before() -> None:
    world = World(RecordTable, 1000)
    for key in KEYS[:9]:
        world.reserve(key, 1)
        world.table.commit(key)
    world.table.pin(KEYS[3])
    source, later = world.table.source(), world.log.cut()
    world.table.forget_all()
    assert all(map(world.table.lacks, KEYS))
    assert set(source.committed(later).keys[:]) == set(KEYS[:9])


def test_a_snapshot_is_given_up_when_another_one_is_planned() -> None:
    world = World(RecordTable, 1000)
    first, cut = world.table.source(), world.log.cut()
    second = world.table.source()
    with pytest.raises(SnapshotCancelledError):
        first.committed(cut)
    assert not len(second.committed(cut).keys)


@pytest.mark.parametrize("make", [PlainRecordTable, RecordTable])
@pytest.mark.parametrize("max_records", [5, 100])
def test_what_is_restored_beyond_the_bound_is_evicted_from_the_least_recently_used_on(
    make: Callable[..., PlainRecordTable], max_records: int
) -> None:
    first = World(make, 100)
    for key in KEYS[:12]:
        first.reserve(key, PAGE_BYTES)
        first.table.commit(key)
    found = FoundRecords()
    for key in first.table.eviction_order():
        record = first.table.find(key)
        assert record is not None
        found.put(FoundRecord(key, record.address, record.payload_bytes))
    world = World(make, max_records)
    world.segments.by_number.clear()
    world.segments.ready.clear()
    for number in first.segments.by_number:
        segment = Segment(number, SEGMENT_BYTES, 0)
        segment.stage = SegmentStage.FULL
        world.segments.add(segment)
    world.table.restore(found)
    world.table.make_room(0, 0)
    kept = KEYS[:12][-min(12, max_records) :]
    assert world.table.eviction_order() == kept
    counts = world.table.take_counts()
    assert counts.evictions == 12 - len(kept) and counts.evicted_bytes == counts.evictions * cost_of(PAGE_BYTES)
    live_bytes = sum(segment.live_bytes for segment in world.segments.by_number.values())
    assert live_bytes == world.table.used_bytes == len(kept) * cost_of(PAGE_BYTES)
    changes, _ = world.log.take()
    assert len(changes) == counts.evictions
    assert all(record.state is KeyState.COMMITTED for record in map(world.table.find, kept) if record)


@pytest.mark.parametrize("make", [PlainRecordTable, RecordTable])
def test_of_a_key_that_was_found_twice_the_last_counts(make: Callable[..., PlainRecordTable]) -> None:
    world = World(make, 100)
    world.segments.by_number.clear()
    world.segments.ready.clear()
    segment = Segment(0, SEGMENT_BYTES, 0)
    segment.stage = SegmentStage.FULL
    world.segments.add(segment)
    keys = [KEYS[0], KEYS[1], KEYS[0]]
    addresses = [SEGMENT_HEAD_BYTES + place * cost_of(PAGE_BYTES) for place in range(3)]
    world.table.restore(FoundRecords(keys, addresses, [PAGE_BYTES] * 3))
    assert world.table.num_keys == 2 and world.table.eviction_order() == KEYS[:2]
    record = world.table.find(KEYS[0])
    assert record is not None and record.address == addresses[2]
    assert segment.live_bytes == world.table.used_bytes == 2 * cost_of(PAGE_BYTES)
    assert world.table.take_counts().invalidations == 0
