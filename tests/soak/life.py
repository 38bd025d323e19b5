"""One engine on a directory: opens it, checks the content, works, meets troubles, and ends as planned."""

from __future__ import annotations

import gc
import os
import threading
from random import Random

from hybridkv.tiers.disk import DiskMedium, ThreadJanitor, plan_sizes
from hybridkv.tiers.disk.format.layout import rank_name, segment_name
from hybridkv.tiers.errors import TierConfigurationError
from kits.plain_disk_medium import PlainDiskMedium
from kits.tiers.inline_janitor import InlineJanitor
from soak.checks import Checks, Subject
from soak.content import draw_prompt
from soak.damage import remove_in_the_way
from soak.engine import LOAD_TIMEOUT_S, Clock, Engine, Parts
from soak.findings import SoakError
from soak.plans import GRANULE_BYTES, End, LifePlan, WorldPlan
from soak.power import VolatileIO
from soak.resources import Resources
from soak.sabotage import Sabotage
from soak.stopwatch import Stopwatch
from soak.system_calls import SoakIO
from soak.troubles import Around
from soak.watching import WatchedIndex, watched_records
from soak.weather import Weather
from soak.world_context import WorldContext


class Life:
    """See the module. Raises `SoakError` for a finding."""

    def __init__(self, world: WorldPlan, plan: LifePlan, context: WorldContext) -> None:
        self.world, self.plan, self.context = world, plan, context
        self.random = Random(f"life {plan.seed}")
        self.clock = Clock(plan.is_threaded)
        self.io = self._make_io()
        self.resources = Resources(context.tally)
        self.stopwatch = Stopwatch(context)
        around = Around(
            context.root, self.io, self.clock, context.log, self.random, context.small_disk, plan.is_threaded
        )
        self.weather = Weather(world, plan, around, context.tally)
        self._last_moment = threading.Lock()

    def run(self) -> None:
        with watched_records(self.context.log):
            if not self.open():
                return
            self.checks.require_what_was_there()
            for _ in range(self.plan.num_steps):
                self.step()
            self.weather.end_all()
            self.checks.require_recovery()
            if self.plan.end is End.CLEAN:
                self.close()
            elif self.plan.end is End.POWER:
                self.lose_power()
            # Otherwise it is killed while idle.

    # Start and end.

    def _make_io(self) -> SoakIO:
        plan, seed = self.plan, self.plan.seed
        if plan.end is End.POWER:
            ignores = self.context.sabotage is Sabotage.UNSYNCED
            return VolatileIO(self.context.base, seed, plan.end_at, self.lose_power, ignores)
        return SoakIO(seed, plan.end_at if plan.end is End.KILL_IN_CALL else 0)

    def lose_power(self) -> None:
        """Write the directory that a loss of power would leave, and exit at once."""
        assert isinstance(self.io, VolatileIO)
        self._last_moment.acquire()  # only the first thread continues
        self.io.write_image(self.context.image)
        os._exit(0)

    def open(self) -> bool:
        """Open the engine. Returns False if it was refused and may be refused."""
        plan, digest = self.plan, self.world.fingerprint.digest()
        self.context.log.say(f"opening {plan_sizes(plan.options, self.world.num_ranks).max_records}")
        try:
            try:
                far = self._open_index()
            except TierConfigurationError:
                if plan.is_read_only_at_first or not remove_in_the_way(self.context.root):
                    raise
                self.context.tally.add("openings refused, something was in the way")
                far = self._open_index()
        except TierConfigurationError as error:
            if not plan.is_read_only_at_first:
                raise SoakError("refused", str(error)) from error
            self.context.tally.add("openings refused")
            return False
        self.media = [self._medium(digest, rank, plan.is_native) for rank in range(self.world.num_ranks)]
        self.auditors = [self._medium(digest, rank, False) for rank in range(self.world.num_ranks)]
        parts = Parts(self.world.groups, far, self.media, plan.near_bytes, GRANULE_BYTES, self.clock)
        self.engine = Engine(parts, self.random, self.context.tally, self.context.sabotage.tamper)
        self.resources.note_open(plan.options, self.world.num_ranks)
        subject = Subject(self.world, plan, self.context, self.engine, self.auditors, self.clock)
        self.checks = Checks(subject, self.weather, self.stopwatch, self.random)
        far.tell(self.context.log, self.has_files, self.checks.on_withdrawal)
        return True

    def _open_index(self) -> WatchedIndex:
        plan, root = self.plan, str(self.context.root)
        janitor = ThreadJanitor() if plan.is_threaded else InlineJanitor()
        try:
            with self.stopwatch.timed("open"):
                return WatchedIndex(root, self.world.fingerprint, plan.options, janitor, self.io, self.clock)
        except TierConfigurationError:
            janitor.close(10.0)
            raise

    def _medium(self, digest: bytes, rank: int, is_native: bool) -> DiskMedium:
        where = str(self.context.root), digest, rank, self.plan.options
        return DiskMedium(*where, None, self.clock) if is_native else PlainDiskMedium(*where, self.io, self.clock)

    def has_files(self, segment: int) -> bool:
        ranks = self.context.root / self.world.fingerprint.digest().hex()
        return all((ranks / rank_name(rank) / segment_name(segment)).exists() for rank in range(self.world.num_ranks))

    def close(self) -> None:
        engine = self.engine
        with self.stopwatch.timed("settle"):
            engine.settle()
        self.checks.require_counts()
        engine.primary.clear()
        if engine.primary.used_bytes:
            num_bytes, why_not = engine.primary.used_bytes, engine.why_not()
            raise SoakError("leaked", f"{num_bytes} bytes of host memory are leaked: {why_not}")
        with self.stopwatch.timed("close"):
            for mover in engine.movers:
                mover.close(self.plan.options.close_timeout_s)
            for medium in self.auditors:
                medium.close()
            engine.stack.close()
        # The extension's queues close their descriptors when they are no longer referenced.
        del engine, mover, medium, self.engine, self.media, self.auditors, self.checks
        gc.collect()
        self.resources.require_given_back()

    # Steps.

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
        elif self.plan.has_faults and roll < 0.97 and self.weather.change(self.random):
            self.checks.require_recovery()
        with self.stopwatch.timed("step"):
            self.engine.step()
        self.context.tally.add("steps")
        self.context.sabotage.at_step(self.engine, self.context.log)
        self.resources.sample()
        self.clock.skew_s += 0.0 if self.plan.is_threaded else self.random.choice([0.0, 0.01, 0.3])

    def pause(self) -> None:
        """Let all work settle, without new requests."""
        if self.weather.is_frozen:
            return
        with self.stopwatch.timed("settle"):
            self.engine.settle()
        if not self.weather.going_on:
            self.engine.far.drain(LOAD_TIMEOUT_S)
        self.checks.require_visible()

    def audit_some(self) -> None:
        must = list(self.context.log.ledger.must)
        if must and not self.weather.is_frozen:
            self.checks.audit(self.random.sample(must, min(len(must), 5)))

    def withdraw(self) -> None:
        must = list(self.context.log.ledger.must)
        if must:
            self.engine.stack.invalidate(self.random.choice(must))

    def clear(self) -> None:
        """Clear all tiers, as a cache reset does. It is durable unless a trouble is active."""
        if self.weather.going_on or self.context.log.ledger.is_unsettled:
            return
        with self.stopwatch.timed("clear"):
            self.engine.settle()
            self.engine.stack.clear()
        self.context.log.say("cleared")
        self.context.tally.add("clears")
