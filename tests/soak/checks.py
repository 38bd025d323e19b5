"""Properties of an engine that are checked after a restart, during troubles, and at its end."""

from __future__ import annotations

import errno
import os
from random import Random
from typing import NamedTuple

from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason
from hybridkv.tiers.disk import DiskMedium
from soak.content import key_of
from soak.engine import LOAD_TIMEOUT_S, LONGEST_PAUSE_S, PROMOTED, Clock, Engine
from soak.findings import SoakError
from soak.plans import LifePlan, WorldPlan
from soak.stopwatch import Stopwatch
from soak.troubles import Blame
from soak.watching import segment_of
from soak.weather import Weather
from soak.world_context import WorldContext

RECOVERY_ATTEMPTS = 40
MOST_AUDITED = 60
"""Chunks audited at an opening. After a loss of power all are audited."""


class Subject(NamedTuple):
    """The objects under test, and what the checks need.

    Args:
        auditors: one medium per rank, which reads the same files as the engine's.
    """

    world: WorldPlan
    plan: LifePlan
    context: WorldContext
    engine: Engine
    auditors: list[DiskMedium]
    clock: Clock


class Checks:
    """Raise `SoakError` if a property does not hold."""

    def __init__(self, subject: Subject, weather: Weather, stopwatch: Stopwatch, random: Random) -> None:
        self._world, self._plan, self._context, self._engine, self._auditors, self._clock = subject
        self._log, self._tally = subject.context.log, subject.context.tally
        self._weather = weather
        self._stopwatch = stopwatch
        self._random = random

    def require_what_was_there(self) -> None:
        """After a restart: no chunk is lost, no cleared chunk is back, and all bytes are right."""
        ledger, far = self._log.ledger, self._engine.far
        if ledger.is_short:
            for key in [key for key in ledger.must if far.lookup(key) is not LookupResult.HIT]:
                self._log.say(f"gone {key.hex()}")
        self._log.say("opened")
        lost = [key for key in ledger.must if far.lookup(key) is not LookupResult.HIT]
        if lost:
            self._tally.add("chunks lost", len(lost))
            raise SoakError("lost", f"{len(lost)} of {len(ledger.must)} chunks, the first {lost[0].hex()}")
        back = [key for key in ledger.banned if far.lookup(key) is not LookupResult.MISS]
        if back:
            self._find("undead", f"{len(back)} cleared chunks are offered, the first {back[0].hex()}")
        self._tally.add("chunks found at openings", len(ledger.must))
        keys = list(ledger.must)
        self.audit(keys if ledger.is_torn or len(keys) <= 60 else self._random.sample(keys, 60))
        self._adopt()

    def _adopt(self) -> None:
        """Add chunks to the ledger that were written completely before the end but not committed; from now on they must
        stay.

        After a loss of power they may also be torn, which a load detects.
        """
        log, far = self._log, self._engine.far
        beside = [key for key in sorted(log.ledger.begun.difference(log.ledger.must)) if far.pin(key) is not None]
        for key in beside:
            far.unpin(key)
        if log.ledger.is_torn:
            for key, reason in self._engine.audit(beside, self._auditors).items():
                self._tally.add(f"torn by a loss of power, {reason}")
                self._engine.stack.invalidate(key)
        for key in beside:
            slot = far.pin(key)
            if slot is not None:
                far.unpin(key)
                log.say(f"committed {key.hex()} {segment_of(slot)}")
                self._tally.add("chunks found beside")

    def audit(self, keys: list[bytes]) -> None:
        """No chunk that must be there is unreadable, unless a trouble prevents reads."""
        must = self._log.ledger.must
        with self._stopwatch.timed("audit"):
            failures = self._engine.audit(keys, self._auditors)
        if self._weather.blames - {Blame.STORES}:
            return
        bad = {key: reason for key, reason in failures.items() if key in must}
        if bad:
            self._tally.add("chunks lost", len(bad))
            key, reason = next(iter(bad.items()))
            raise SoakError("lost", f"{len(bad)} chunks cannot be read, the first {key.hex()}: {reason}")

    def on_withdrawal(self, reason: str) -> None:
        """Called when a chunk on disk is withdrawn as bad."""
        self._tally.add(f"withdrawn, {reason}")
        is_ours = reason not in list(FailureReason)
        if not is_ours and Blame.READS not in self._weather.blames and not self._log.ledger.is_damaged:
            after = f"after nothing but {self._weather}: {self._engine.failure}"
            self._find("destroyed", f"a chunk was withdrawn with reason {reason}, {after}")

    def _find(self, kind: str, detail: str) -> None:
        """Raise the finding, or count it if it is known."""
        if kind not in self._context.known:
            raise SoakError(kind, detail)
        self._tally.add(f"KNOWN: {kind}")

    def require_counts(self) -> None:
        """After settling: the index offers the keys of the ledger, and the disk stays within its limits."""
        far, ledger = self._engine.far, self._log.ledger
        missing = [key for key in ledger.must if far.lookup(key) is not LookupResult.HIT]
        if missing:
            raise SoakError("lost", f"{len(missing)} chunks are no longer offered, and no event reported it")
        if not ledger.is_damaged and far.num_keys != len(ledger.must):
            raise SoakError("miscounted", f"{far.num_keys} keys, but {len(ledger.must)} are committed")

    def _count_file_work(self) -> None:
        """Count the outcomes of the index's file work. Only errors of the operating system are allowed."""
        counts = self._engine.far.take_disk_counts()
        for name in ("moved_records", "segments_created", "segments_dropped", "snapshots"):
            self._tally.add(name.replace("_", " "), getattr(counts, name))
        for name, count in counts.failures.items():
            self._tally.add(f"file work failed, {name}", count)
            if name.split(": ")[1] not in errno.errorcode.values():
                raise SoakError("went wrong", f"{name}, {count} times")

    def require_visible(self) -> None:
        """A disk that accepts no writes still offers its chunks."""
        if self._weather.blames != {Blame.STORES}:
            return
        hidden = [key for key in self._log.ledger.must if self._engine.stack.lookup(key) is LookupResult.MISS]
        if hidden:
            self._find("hidden", f"{len(hidden)} chunks, after nothing but {self._weather}: {self._engine.why_not()}")

    def require_recovery(self) -> None:
        """Without any trouble, chunks are soon stored on disk again and found there."""
        with self._stopwatch.timed("recover"):
            for attempt in range(RECOVERY_ATTEMPTS):
                self._stopwatch.watch()
                self._engine.settle()  # so that no earlier work causes a delay
                self._clock.skew_s += LONGEST_PAUSE_S if attempt == 0 else 5.0
                if self._is_well():
                    break
            else:
                self._require_full()
        if self._log.ledger.is_unsettled:
            self._log.say("settled")
        self._weather.clear_up()
        self.require_counts()
        self._count_file_work()

    def _is_well(self) -> bool:
        """Whether new chunks are written to the disk and can be loaded from there."""
        engine = self._engine
        engine.settle()
        engine.far.drain(LOAD_TIMEOUT_S)
        prompt = (b"recovery %d %d" % (self._plan.number, self._random.getrandbits(64)),)
        keys = [key_of(prompt[0], group) for group in self._world.groups]
        engine.store(prompt)
        engine.settle()
        engine.settle()
        if any(engine.far.lookup(key) is not LookupResult.HIT for key in keys):
            return False
        for key in keys:
            engine.primary.invalidate(key)
        num_promoted = self._tally.get(PROMOTED)
        engine.request(prompt)
        engine.settle()
        return self._tally.get(PROMOTED) >= num_promoted + len(keys) and not engine.audit(keys, self._auditors)

    def _require_full(self) -> None:
        """Storing may stay impossible only if the file system is full, which keeps its chunks."""
        found = os.statvfs(self._context.root)
        needed_bytes = 4 * self._world.num_ranks * (self._plan.options.segment_bytes or 0)
        if self._context.small_disk is not None and found.f_bavail * found.f_frsize < needed_bytes:
            self._tally.add("times that a small file system stayed full")
            return
        detail = f"after {self._weather} no chunk is stored any more: {self._engine.why_not()}"
        self._find("useless", detail)
