"""One engine on a directory: opens it, checks what is there, works, meets trouble, and ends as its plan says."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import IO, NamedTuple

from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason
from hybridkv.tiers.disk import DiskMedium, InlineJanitor, ThreadJanitor, plan_sizes
from hybridkv.tiers.disk.names import rank_name, segment_name
from hybridkv.tiers.errors import TierConfigurationError
from soak.content import draw_prompt, key_of
from soak.engine import LOAD_TIMEOUT_S, LONGEST_PAUSE_S, Clock, Engine, Parts
from soak.findings import SoakError
from soak.ledger import Log
from soak.plans import GRANULE_BYTES, End, LifePlan, WorldPlan
from soak.power import VolatileIO
from soak.resources import Resources
from soak.sabotage import Sabotage
from soak.small_disk import SmallDisk
from soak.system_calls import SoakIO
from soak.tally import Tally
from soak.troubles import DAMAGES, TROUBLES, Around, Blame, Trouble
from soak.watching import WatchedIndex, segment_of, watched_records

RECOVERY_ATTEMPTS = 40


class Place(NamedTuple):
    """Where a world is, and what is shared with whoever started this life."""

    base: Path
    """Its own directory; `root` below it is the store's."""
    log: Log
    tally: Tally
    stacks: IO[str]
    """Where threads are dumped when they stand still."""
    small_disk: SmallDisk | None
    watchdog_s: float
    sabotage: Sabotage
    known: frozenset[str]
    """Kinds of findings that are counted and do not end the run."""

    @property
    def root(self) -> Path:
        return self.base / "root"

    @property
    def image(self) -> Path:
        """What a loss of power left."""
        return self.base / "image"


class Life:
    """See the module. `SoakError` when something is found."""

    def __init__(self, world: WorldPlan, plan: LifePlan, place: Place) -> None:
        self.world, self.plan, self.place = world, plan, place
        self.random = Random(f"life {plan.seed}")
        self.clock = Clock(plan.is_threaded)
        self.io = self._make_io()
        self.resources = Resources(place.tally)
        self.going_on: dict[Trouble, Callable[[], None]] = {}
        self.recent: dict[str, Blame] = {}
        """Troubles since nothing went on for the last time, when everything had settled."""
        self._last_moment = threading.Lock()
        self._armed_s = -1.0

    def run(self) -> None:
        with watched_records(self.place.log):
            if not self.open():
                return
            self.check_what_is_there()
            for _ in range(self.plan.num_steps):
                self.watch()
                self.step()
            self.end_troubles()
            self.require_recovery()
            if self.plan.end is End.CLEAN:
                self.close()
            elif self.plan.end is End.POWER:
                self.lose_power()
            # Else it is killed while it is idle.

    # Beginning and end.

    def _make_io(self) -> SoakIO:
        plan, seed = self.plan, self.plan.seed
        if plan.end is End.POWER:
            ignores = self.place.sabotage is Sabotage.UNSYNCED
            return VolatileIO(self.place.base, seed, plan.end_at, self.lose_power, ignores)
        return SoakIO(seed, plan.end_at if plan.end is End.KILL_IN_CALL else 0)

    def lose_power(self) -> None:
        """Leave what a disk would hold, and end at once."""
        assert isinstance(self.io, VolatileIO)
        self._last_moment.acquire()  # whoever comes first is the last
        self.io.write_image(self.place.image)
        os._exit(0)

    def open(self) -> bool:
        """False where it may be refused."""
        plan, digest = self.plan, self.world.fingerprint.digest()
        janitor = ThreadJanitor() if plan.is_threaded else InlineJanitor()
        root = str(self.place.root)
        self.watch()
        with self.timed("open"):
            try:
                far = WatchedIndex(root, self.world.fingerprint, plan.options, janitor, self.io, self.clock)
            except TierConfigurationError as error:
                janitor.close(10.0)
                if not plan.is_read_only_at_first:
                    raise SoakError("refused", str(error)) from error
                self.place.tally.add("openings refused")
                return False
        far.tell(self.place.log, self.has_files, self.on_withdrawal)
        self.media = [self._medium(digest, rank, plan.is_native) for rank in range(self.world.num_ranks)]
        self.auditors = [self._medium(digest, rank, False) for rank in range(self.world.num_ranks)]
        parts = Parts(self.world.groups, far, self.media, plan.near_bytes, GRANULE_BYTES, self.clock)
        self.engine = Engine(parts, self.random, self.place.tally, self.place.sabotage.tamper)
        self.resources.note_open(plan.options, self.world.num_ranks)
        if plan.is_read_only_at_first and self.place.small_disk is not None:
            self.going_on[READ_ONLY_AT_FIRST] = self.place.small_disk.make_writable
            self.recent[READ_ONLY_AT_FIRST.name] = Blame.STORES
        return True

    def _medium(self, digest: bytes, rank: int, is_native: bool) -> DiskMedium:
        io = None if is_native else self.io
        return DiskMedium(str(self.place.root), digest, rank, self.plan.options, io, self.clock, is_native or None)

    def has_files(self, segment: int) -> bool:
        ranks = self.place.root / self.world.fingerprint.digest().hex()
        return all((ranks / rank_name(rank) / segment_name(segment)).exists() for rank in range(self.world.num_ranks))

    def close(self) -> None:
        engine = self.engine
        with self.timed("settle"):
            engine.settle()
        self.require_counts()
        engine.near.clear()
        if engine.near.used_bytes:
            raise SoakError("leaked", f"{engine.near.used_bytes} bytes of host memory are nobody's")
        self.watch()
        with self.timed("close"):
            for mover in engine.movers:
                mover.close(self.plan.options.close_timeout_s)
            for medium in self.auditors:
                medium.close()
            engine.stack.close()
        # Queues of the extension give back their descriptors when nobody has them any more.
        del engine, mover, medium, self.engine, self.media, self.auditors
        gc.collect()
        self.resources.require_given_back()

    # What is checked.

    def check_what_is_there(self) -> None:
        """After a restart: nothing is lost, nothing that was cleared is back, and all bytes are right."""
        ledger, far = self.place.log.ledger, self.engine.far
        max_records = plan_sizes(self.plan.options, self.world.num_ranks).max_records
        if max_records < ledger.most_records and len(ledger.begun) > max_records:
            # An index that can hold fewer passes over the rest, and evicts nothing for that.
            for key in [key for key in ledger.must if far.lookup(key) is not LookupResult.HIT]:
                self.place.log.say(f"gone {key.hex()}")
        self.place.log.say(f"held {max_records}")
        lost = [key for key in ledger.must if far.lookup(key) is not LookupResult.HIT]
        if lost:
            self.place.tally.add("chunks lost", len(lost))
            raise SoakError("lost", f"{len(lost)} of {len(ledger.must)} chunks, the first {lost[0].hex()}")
        back = [key for key in ledger.banned if far.lookup(key) is not LookupResult.MISS]
        if back:
            self.find("undead", f"{len(back)} chunks that were cleared are offered, the first {back[0].hex()}")
        self.place.tally.add("chunks found at openings", len(ledger.must))
        keys = list(ledger.must)
        self.audit(keys if ledger.is_torn or len(keys) <= 60 else self.random.sample(keys, 60))
        self.adopt()

    def adopt(self) -> None:
        """What was written whole before the end, and not committed, may be offered too. Then it has to stay.

        After a loss of power it may be torn as well, which a load finds.
        """
        log, far = self.place.log, self.engine.far
        beside = [key for key in sorted(log.ledger.begun.difference(log.ledger.must)) if far.pin(key) is not None]
        for key in beside:
            far.unpin(key)
        if log.ledger.is_torn:
            for key, reason in self.engine.audit(beside, self.auditors).items():
                self.place.tally.add(f"torn by a loss of power, {reason}")
                self.engine.stack.invalidate(key)
        for key in beside:
            slot = far.pin(key)
            if slot is not None:
                far.unpin(key)
                log.say(f"committed {key.hex()} {segment_of(slot)}")
                self.place.tally.add("chunks found beside")
        if log.ledger.is_torn:
            log.say("whole")

    def audit(self, keys: list[bytes]) -> None:
        """Nothing that has to be there is unreadable, while nothing stands against reading it."""
        must = self.place.log.ledger.must
        with self.timed("audit"):
            failures = self.engine.audit(keys, self.auditors)
        if self.going_on or self.blames:
            return
        bad = {key: reason for key, reason in failures.items() if key in must}
        if bad:
            self.place.tally.add("chunks lost", len(bad))
            key, reason = next(iter(bad.items()))
            raise SoakError("lost", f"{len(bad)} chunks cannot be read, the first {key.hex()}: {reason}")

    def on_withdrawal(self, reason: str) -> None:
        """Somebody says that a chunk on disk is bad."""
        self.place.tally.add(f"withdrawn, {reason}")
        is_ours = reason not in list(FailureReason)
        if not is_ours and Blame.READS not in self.blames and not self.place.log.ledger.is_damaged:
            after = f"after nothing but {self._troubles()}: {self.engine.failure}"
            self.find("destroyed", f"a chunk was withdrawn as {reason}, {after}")

    @property
    def blames(self) -> set[Blame]:
        return set(self.recent.values())

    def find(self, kind: str, detail: str) -> None:
        """Raise it, unless it is known."""
        if kind not in self.place.known:
            raise SoakError(kind, detail)
        self.place.tally.add(f"KNOWN: {kind}")

    def _troubles(self) -> str:
        return " and ".join(self.recent) or "no trouble"

    def require_counts(self) -> None:
        """Everything has settled: the index offers what the ledger says, and the disk takes no more than it may."""
        far, ledger = self.engine.far, self.place.log.ledger
        missing = [key for key in ledger.must if far.lookup(key) is not LookupResult.HIT]
        if missing:
            raise SoakError("lost", f"{len(missing)} chunks are not offered any more, and nobody said so")
        if not ledger.is_damaged and far.num_keys != len(ledger.must):
            raise SoakError("miscounted", f"{far.num_keys} keys, {len(ledger.must)} of them committed")

    def count_file_work(self) -> None:
        """What became of the index's file work. The system may refuse it; nothing else may go wrong with it."""
        counts = self.engine.far.take_disk_counts()
        for name in ("moved_records", "segments_created", "segments_dropped", "snapshots"):
            self.place.tally.add(name.replace("_", " "), getattr(counts, name))
        for name, count in counts.failures.items():
            self.place.tally.add(f"file work failed, {name}", count)
            if name.split(": ")[1] not in errno.errorcode.values():
                raise SoakError("went wrong", f"{name}, {count} times")

    def require_visible(self) -> None:
        """A disk that takes nothing still gives what it has."""
        if not self.blames or not self.blames <= {Blame.STORES}:
            return
        hidden = [key for key in self.place.log.ledger.must if self.engine.stack.lookup(key) is LookupResult.MISS]
        if hidden:
            self.find("hidden", f"{len(hidden)} chunks, after nothing but {self._troubles()}")

    def require_recovery(self) -> None:
        """Nothing stands against it any more: soon chunks are stored on disk again, and found there."""
        engine, group = self.engine, self.world.groups[0]
        with self.timed("recover"):
            for attempt in range(RECOVERY_ATTEMPTS):
                self.watch()
                self.clock.skew_s += LONGEST_PAUSE_S if attempt == 0 else 5.0
                engine.settle()
                engine.far.drain(LOAD_TIMEOUT_S)
                key = key_of(b"recovery %d %d" % (self.plan.number, self.random.getrandbits(64)), group)
                engine.store((key[:-1],))
                engine.settle()
                engine.settle()
                if engine.far.lookup(key) is LookupResult.HIT and not engine.audit([key], self.auditors):
                    break
            else:
                self.require_full()
        if self.place.log.ledger.is_unsettled:
            self.place.log.say("settled")
        self.recent.clear()
        self.require_counts()
        self.count_file_work()

    def require_full(self) -> None:
        """Nothing is stored any more: only where a file system is full, which then keeps what it has."""
        found = os.statvfs(self.place.root)
        needed_bytes = 4 * self.world.num_ranks * (self.plan.options.segment_bytes or 0)
        if self.place.small_disk is not None and found.f_bavail * found.f_frsize < needed_bytes:
            self.place.tally.add("times that a small file system stayed full")
            return
        detail = f"after {self._troubles()} nothing is stored any more: {self.engine.why_not()}"
        self.find("useless", detail)

    # What it does.

    def step(self) -> None:
        roll = self.random.random()
        if roll < 0.70:
            self.engine.request(draw_prompt(self.random, self.world.longest_prompt))
        elif roll < 0.75:
            for _ in range(self.random.randint(3, 12)):
                self.engine.request(draw_prompt(self.random, self.world.longest_prompt))
        elif roll < 0.85:
            self.pause()
        elif roll < 0.88:
            self.audit_some()
        elif roll < 0.90:
            self.withdraw()
        elif roll < 0.903:
            self.clear()
        elif self.plan.has_faults and roll < 0.97:
            self.begin_or_end_trouble()
        with self.timed("step"):
            self.engine.step()
        self.place.tally.add("steps")
        self.place.sabotage.at_step(self.engine, self.place.log)
        self.resources.sample()
        self.clock.skew_s += 0.0 if self.plan.is_threaded else self.random.choice([0.0, 0.01, 0.3])

    @property
    def is_frozen(self) -> bool:
        return any(trouble.name.startswith("frozen") for trouble in self.going_on)

    def pause(self) -> None:
        """Nothing is asked for a while."""
        if self.is_frozen:
            return
        with self.timed("settle"):
            self.engine.settle()
        if not self.going_on:
            self.engine.far.drain(LOAD_TIMEOUT_S)
            self.require_visible()

    def audit_some(self) -> None:
        must = list(self.place.log.ledger.must)
        if must and not self.is_frozen:
            self.audit(self.random.sample(must, min(len(must), 5)))

    def withdraw(self) -> None:
        must = list(self.place.log.ledger.must)
        if must:
            self.engine.stack.invalidate(self.random.choice(must))

    def clear(self) -> None:
        """As a reset of the cache: it is durable when nothing stands against that."""
        if self.going_on or self.place.log.ledger.is_unsettled:
            return
        with self.timed("clear"):
            self.engine.settle()
            self.engine.stack.clear()
        self.place.log.say("cleared")
        self.place.tally.add("clears")

    def begin_or_end_trouble(self) -> None:
        if self.going_on and self.random.random() < 0.6:
            trouble = self.random.choice(list(self.going_on))
            self.going_on.pop(trouble)()
            if self.random.random() < 0.5:
                self.end_troubles()
                self.require_recovery()
            return
        if len(self.going_on) >= 2:
            return
        trouble = self.random.choice(TROUBLES if self.random.random() < 0.85 else self._damages())
        if trouble in self.going_on:
            return
        around = Around(
            self.place.root,
            self.io,
            self.clock,
            self.place.log,
            self.random,
            self.place.small_disk,
            self.plan.is_threaded,
        )
        with contextlib.suppress(OSError):  # of the trouble itself: a read-only disk cannot be damaged
            over = trouble.begin(around)
            if over is not None:
                self.recent[trouble.name] = trouble.blame
                self.going_on[trouble] = over
                self.place.tally.add(f"trouble: {trouble.name}")

    def _damages(self) -> list[Trouble]:
        return DAMAGES if self.world.has_damage else TROUBLES

    def end_troubles(self) -> None:
        while self.going_on:
            _, over = self.going_on.popitem()
            over()

    # Time.

    def watch(self) -> None:
        """From now on, a process that stands still for too long is dumped and ended."""
        now_s = time.monotonic()
        if now_s - self._armed_s > min(1.0, self.place.watchdog_s / 4):
            faulthandler.dump_traceback_later(self.place.watchdog_s, exit=True, file=self.place.stacks)
            self._armed_s = now_s

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self.place.tally.most(f"longest {name}, ms", int(1000 * (time.monotonic() - started_s)))


READ_ONLY_AT_FIRST = Trouble("read-only from the beginning", Blame.STORES, lambda _: None)
