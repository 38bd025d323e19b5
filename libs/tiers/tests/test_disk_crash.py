"""Killed writers leave all chunks that they reported as committed, and none that they reported as withdrawn.

A committed chunk is found with its bytes, unless an index evicted it: the writer's, which reports it, or that of the
next opening, which is watched key by key. A chunk that every rank had written whole and the index had not committed may
be found too, since an opening recovers all whole records. No other chunk is found.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import disk_store
import disk_writer
import pytest

from hybridkv.tiers import Ticket
from hybridkv.tiers.disk import DiskIndex, DiskOptions
from hybridkv.tiers.disk.index.records import Record, RecordTable

KILLS_OF_SEED = dict.fromkeys(range(8), 20) | dict.fromkeys(range(8, 12), 10)
"""200 in all. The last seeds are of writers with a janitor thread."""
FIRST_THREADED_SEED = 8
kills: Counter[str] = Counter()
"""By kind of work."""
kills_of_seed: Counter[int] = Counter()


@dataclass
class Expected:
    """Versions of one key that may be found after the writer's reports. 0: none."""

    must: int = 0
    may: set[int] = field(default_factory=set)


def expectations(words: list[str]) -> dict[bytes, Expected]:
    found = {key: Expected() for key in disk_writer.KEYS + disk_writer.HELD_KEYS}
    for line in words:
        kind, *rest = line.split()
        if kind == "evicted":
            expected = found[bytes.fromhex(rest[0])]
            expected.may.add(expected.must)
            expected.must = 0
        elif kind in ("begin", "done"):
            apply(found, kind, *rest)
    return found


def apply(found: dict[bytes, Expected], kind: str, verb: str, key_hex: str, version: str) -> None:
    if verb == "clear":
        for expected in found.values():
            begin_or_end_withdrawal(expected, kind)
    elif verb in ("put", "abort", "invalidate"):
        expected = found[bytes.fromhex(key_hex)]
        if verb == "put" and kind == "begin":
            expected.may.add(int(version))
        elif verb == "put":
            expected.must = int(version)
        elif verb == "abort" and kind == "begin":
            expected.may.add(int(version))
        else:
            begin_or_end_withdrawal(expected, kind)


def begin_or_end_withdrawal(expected: Expected, kind: str) -> None:
    if kind == "begin":
        expected.may.add(expected.must)
        expected.must = 0
    else:
        expected.may.clear()


def reopened(path: Path, options: DiskOptions) -> tuple[DiskIndex, set[bytes]]:
    """The reopened index, and the keys that it evicted during the opening."""
    evicted: set[bytes] = set()
    evict = RecordTable._evicted

    def watch(table: RecordTable, key: bytes, record: Record) -> None:
        evicted.add(key)
        evict(table, key, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordTable, "_evicted", watch)
        index = disk_store.make_index(path, options, tensor_parallel_size=disk_writer.NUM_RANKS)
    assert len(evicted) == index.take_counts().evictions
    return index, evicted


def check(path: Path, words: list[str], options: DiskOptions = disk_writer.OPTIONS) -> set[bytes]:
    """Check the store against the reports; return the keys that the opening evicted."""
    ranks = disk_writer.NUM_RANKS
    index, evicted = reopened(path, options)
    media = [disk_store.make_medium(path, options, rank=rank, tensor_parallel_size=ranks) for rank in range(ranks)]
    lost = set()
    for key, expected in expectations(words).items():
        slot = index.pin(key)
        if slot is None:
            lost |= {key} if expected.must else set()
            continue
        allowed = {expected.must, *expected.may} - {0}
        found = set()
        for rank, medium in enumerate(media):
            destination = bytearray(slot.num_bytes)
            medium.load(Ticket(1), key, slot, [destination])
            [completion] = disk_store.finish(medium)
            assert completion.failure is None, completion.failure
            found.add(next((v for v in allowed if disk_writer.payload(key, v, rank) == destination), None))
        assert len(found) == 1 and None not in found, f"{key!r} is found with wrong bytes; allowed versions: {allowed}"
    assert lost <= evicted, f"committed chunks are not found: {lost - evicted}"
    for medium in media:
        medium.close()
    index.close()
    return evicted


@pytest.mark.parametrize("seed", KILLS_OF_SEED)
def test_a_killed_writer_leaves_exactly_its_committed_chunks(seed: int, tmp_path: Path) -> None:
    on_janitor = seed >= FIRST_THREADED_SEED
    words, num_calls = disk_writer.write_until_killed(tmp_path / "whole", seed, -1, on_janitor)
    check(tmp_path / "whole", words)
    chooser = random.Random(seed)
    for number in range(KILLS_OF_SEED[seed]):
        path = tmp_path / str(number)
        kill_at = chooser.randrange(1, max(num_calls * 3 // 4, 2))
        words, was_not_killed = disk_writer.write_until_killed(path, seed, kill_at, on_janitor)
        if not was_not_killed:
            kills_of_seed[seed] += 1
            kills[next(line.split()[1] for line in words if line.startswith("killed"))] += 1
        check(path, words)


@pytest.mark.parametrize("seed", range(20, 24))
def test_a_killed_writer_with_room_for_all_loses_nothing(seed: int, tmp_path: Path) -> None:
    """Nothing is evicted, neither before the kill nor by the next opening, so that every loss is an error.

    Keys that the writer reports as evicted when it is killed are those that it was about to clear.
    """
    words, num_calls = disk_writer.write_until_killed(tmp_path / "whole", seed, -1, options=disk_writer.ROOMY_OPTIONS)
    assert not check(tmp_path / "whole", words, disk_writer.ROOMY_OPTIONS)
    chooser = random.Random(seed)
    for number in range(10):
        path = tmp_path / str(number)
        kill_at = chooser.randrange(num_calls // 4, num_calls * 3 // 4)
        words, _ = disk_writer.write_until_killed(path, seed, kill_at, options=disk_writer.ROOMY_OPTIONS)
        words = [line for line in words if not line.startswith("evicted")]
        assert sum(line.startswith("done put") for line in words) > 3
        assert not check(path, words, disk_writer.ROOMY_OPTIONS)


def test_writers_were_killed_in_every_kind_of_work() -> None:
    threaded = {seed for seed in KILLS_OF_SEED if seed >= FIRST_THREADED_SEED}
    assert all(kills_of_seed[seed] == KILLS_OF_SEED[seed] for seed in KILLS_OF_SEED.keys() - threaded), kills_of_seed
    # A janitor thread may make fewer calls than in the whole run. Then its writer ends before its kill.
    assert sum(kills_of_seed[seed] for seed in threaded) >= 20, kills_of_seed
    assert {"Copy", "Save", "Drop", "Create", "Seal", "medium"} <= kills.keys(), kills


def test_the_check_finds_a_missing_chunk(tmp_path: Path) -> None:
    words, _ = disk_writer.write_until_killed(tmp_path / "store", 1, kill_at=-1)
    key = next(key for key, expected in expectations(words).items() if not expected.must and not expected.may)
    with pytest.raises(AssertionError, match="not found"):
        check(tmp_path / "store", [*words, f"done put {key.hex()} 9999"])
