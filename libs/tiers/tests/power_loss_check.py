"""Checks a store that is opened after a loss of power against the reports of its writer.

- `always`: a committed chunk is found with its bytes on every rank, unless it was evicted. A withdrawn chunk is not
found. Every found chunk loads.

- `interval`: the same for chunks that a sync covered. A load of another found chunk may fail, and is a miss then.

- `none`: every loaded chunk was stored under its key, and not before the last finished `clear`.

No other bytes ever load, and a chunk has the same version on every rank.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import disk_store
import disk_writer
import msgspec
import power_loss_writer
import pytest
from power_loss import Disk, Moods, read_log
from power_loss_writer import NUM_RANKS, WriterOrders

from hybridkv.tiers import Ticket
from hybridkv.tiers.disk import DiskIndex, DiskMedium, Fsync
from hybridkv.tiers.disk.format.layout import number_of, offset_of, rank_name, record_bytes, segment_name
from hybridkv.tiers.disk.index.records import Record, RecordTable

RANKS = {"tensor_parallel_size": NUM_RANKS}


@dataclass
class Expected:
    """Versions of one key that may be found. `must` 0: none has to be found."""

    must: int = 0
    may: set[int] = field(default_factory=set)

    @property
    def allowed(self) -> set[int]:
        return {self.must} if self.must else self.may - {0}

    def give_up(self) -> None:
        self.may.add(self.must)
        self.must = 0


class Run:
    """Run of a writer; power can be lost anywhere in its log, any number of times.

    Args:
        orders: for the writer.
        watch: the library that is preloaded into it.
    """

    def __init__(self, orders: WriterOrders, watch: Path) -> None:
        self.orders = orders
        top = Path(orders.path).parent
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
            "LD_PRELOAD": str(watch),
        }
        program = [sys.executable, power_loss_writer.__file__, msgspec.json.encode(orders).decode()]
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
        assert not ended.returncode, ended.stderr[-4000:]
        self.log = read_log(Path(orders.log))
        # The directories of a new store are synced, except with `none`.
        self.disk = Disk(self.log, top.stat().st_ino, keeps_made_directories=orders.fsync is Fsync.NONE)
        self.certain_at = {
            time: self._certain_at(time, *words[2:]) for time, words in self.log.said if words[:2] == ("done", "put")
        }
        """Per commit: the time at which a sync had covered its record on every rank."""
        self.found: Counter[str] = Counter()

    def _certain_at(self, time: int, key_hex: str, version: int, address: int) -> int | None:
        size = record_bytes(len(disk_writer.payload(bytes.fromhex(key_hex), version, 0)))
        cache = disk_store.fingerprint(**RANKS).digest().hex()
        name = Path(self.orders.path).name
        latest = time
        for rank in range(NUM_RANKS):
            path = (name, cache, rank_name(rank), segment_name(number_of(address)))
            certain_at = self.disk.is_certain(path, offset_of(address), size, time)
            if certain_at is None:
                return None
            latest = max(latest, certain_at)
        return latest

    def share_certain(self, kind: str) -> float:
        """Share of actions of this kind after which the last commit before them was certain.

        Only the last commit counts: records in a segment that was sealed meanwhile are certain in any case.
        """
        outcomes = []
        last = begun = None
        for time, (verb, what, *_) in self.log.said:
            if (verb, what) == ("done", "put"):
                last = time
            elif what == "clear":
                last = None
            elif (verb, what) == ("begin", kind):
                begun = last
            elif (verb, what) == ("done", kind) and begun is not None:
                certain_at = self.certain_at[begun]
                outcomes.append(certain_at is not None and certain_at <= time)
        return sum(outcomes) / len(outcomes)

    def lose_power(self, time: int, mood: int, seed: int, path: Path) -> None:
        """Build the contents after a power loss at `path`, open the store, and check it."""
        self.disk.write_out(time, mood, random.Random(seed), path)
        try:
            self._check(path / Path(self.orders.path).name, self.expectations(time))
        except AssertionError as error:
            error.add_note(f"{self.orders}, power lost at {time} of {self.log.end}, mood {mood}, seed {seed}")
            raise
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def expectations(self, time: int) -> dict[bytes, Expected]:
        found = {key: Expected() for key in disk_writer.KEYS}
        has_looked = False
        for told_at, (verb, kind, key_hex, version, _) in self.log.said:
            if told_at <= time:
                self._apply(found, time, told_at, verb, kind, bytes.fromhex(key_hex), version)
            # An index reports an eviction only on the next lookup or reservation of the key.
            elif not has_looked and (verb == "evicted" or (verb, kind) == ("begin", "put")):
                found[bytes.fromhex(key_hex)].give_up()
            elif verb == "looked":
                has_looked = True
        return found

    def _apply(
        self, found: dict[bytes, Expected], time: int, told_at: int, verb: str, kind: str, key: bytes, version: int
    ) -> None:
        if kind == "clear":
            for expected in found.values():
                expected.give_up()
                if verb == "done":
                    expected.may.clear()
        elif kind == "put" and verb == "begin":
            found[key].give_up()
            found[key].may.add(version)
        elif kind == "put" and verb == "done":
            found[key].must = version if self._must_be_there(told_at, time) else 0
        elif kind == "withdrawal" or verb == "evicted":
            found[key].give_up()
            if verb == "done" and self.orders.fsync is not Fsync.NONE:
                found[key].may.clear()

    def _must_be_there(self, told_at: int, time: int) -> bool:
        if self.orders.fsync is Fsync.INTERVAL:
            certain_at = self.certain_at[told_at]
            return certain_at is not None and certain_at <= time
        return self.orders.fsync is Fsync.ALWAYS

    def _check(self, path: Path, expectations: dict[bytes, Expected]) -> None:
        index, evicted = self._reopened(path)
        media = [DiskMedium(str(path), index.namespace, rank, self.orders.options) for rank in range(NUM_RANKS)]
        try:
            for key, expected in expectations.items():
                versions = self._loaded(index, media, key, expected.allowed)
                if expected.must:
                    self.found["had to be there"] += 1
                    assert versions or key in evicted, f"{key!r} was committed and is not found"
                self.found["was there"] += bool(versions)
        finally:
            for medium in media:
                medium.close()
            index.close()

    def _reopened(self, path: Path) -> tuple[DiskIndex, set[bytes]]:
        """The reopened index, and the keys that it evicted during the opening."""
        evicted: set[bytes] = set()
        evict = RecordTable._evicted

        def watch(table: RecordTable, key: bytes, record: Record) -> None:
            evicted.add(key)
            evict(table, key, record)

        path.mkdir(mode=0o700, exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RecordTable, "_evicted", watch)
            index = disk_store.make_index(path, self.orders.options, **RANKS)
        assert not (evicted and self.orders.is_roomy), "there is room for all chunks"
        return index, evicted

    def _loaded(self, index: DiskIndex, media: Sequence[DiskMedium], key: bytes, allowed: set[int]) -> set[int]:
        """The version that loads, if one does."""
        slot = index.pin(key)
        if slot is None:
            return set()
        versions = set()
        for rank, medium in enumerate(media):
            destination = bytearray(slot.num_bytes)
            medium.load(Ticket(1), key, slot, [destination])
            [completion] = disk_store.finish(medium)
            if completion.failure is not None:
                assert self.orders.fsync is not Fsync.ALWAYS, f"{key!r} is found and cannot be loaded: {completion}"
                self.found["could not be loaded"] += 1
                return set()
            same = [version for version in allowed if disk_writer.payload(key, version, rank) == destination]
            assert same, f"{key!r} is found with wrong bytes; allowed versions: {allowed}"
            versions.add(same[0])
        assert len(versions) == 1, f"{key!r} has different versions on the ranks: {versions}"
        index.unpin(key)
        return versions

    def times(self, count: int, chooser: random.Random) -> list[int]:
        """Times to lose power at: the end, right after commits, and random ones."""
        commits = [time for time, words in self.log.said if words[0] == "done"]
        chosen = [self.log.end]
        while len(chosen) < count:
            chosen.append(chooser.choice(commits) if len(chosen) % 3 else chooser.randrange(self.log.end))
        return chosen

    def lose_power_often(self, count: int, path: Path) -> None:
        """Uncertain writes are lost, kept, or kept at random."""
        chooser = random.Random(self.orders.seed)
        moods = (Moods.NOTHING, Moods.CHANCE, Moods.ALL, Moods.CHANCE, Moods.CHANCE)
        for number, time in enumerate(self.times(count, chooser)):
            self.lose_power(time, moods[number % len(moods)], number, path / f"lost-{number}")

    def lose_power_after_each_commit(self, path: Path) -> None:
        """All uncertain writes are lost."""
        for number, time in enumerate(sorted(self.certain_at)):
            self.lose_power(time, Moods.NOTHING, number, path / f"commit-{number}")
