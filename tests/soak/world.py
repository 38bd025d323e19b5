"""A directory and the engines that open it one after the other: starts and ends their processes, keeps the ledger."""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import shutil
import signal
import time
import traceback
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from hybridkv.tiers.disk import Fsync
from soak.findings import SoakError
from soak.ledger import Ledger, Log, Script, read_script
from soak.life import Life
from soak.plans import End, LifePlan, Mode, WorldPlan, draw_life, draw_world
from soak.sabotage import Sabotage
from soak.small_disk import SmallDisk
from soak.tally import Tally
from soak.world_context import WorldContext

FOUND = 3
"""Exit status of a process with a finding."""
POLL_S = 0.001
MOST_MEMORY_GROWTH_MIB = 192


class Surroundings(NamedTuple):
    """Shared by all worlds of a run."""

    directory: Path
    mode: Mode
    tally: Tally
    may_mount: bool
    watchdog_s: float
    sabotage: Sabotage
    known: frozenset[str]


class World:
    """See the module.

    Args:
        seed: determines everything in it.
        around: shared by all worlds of the run.
    """

    def __init__(self, seed: str, around: Surroundings) -> None:
        self._around = around
        self.plan: WorldPlan = draw_world(seed, around.mode)
        self.ledger = Ledger()
        self.directory = around.directory / seed.replace(" ", "-")
        self._base = self.directory / "base"
        self._base.mkdir(mode=0o700, parents=True)
        self._small_disk: SmallDisk | None = None

    def run(self, deadline_s: float, most_ends: int) -> int:
        """Run its lives until the deadline (of `time.monotonic`) or `most_ends` ends. Returns the number of ends.

        Raises `SoakError` for a finding; then its directory is kept.
        """
        self._mount()
        number = num_ends = 0
        while number < self.plan.num_lives and num_ends < most_ends and time.monotonic() < deadline_s:
            self._around.sabotage.before_life(self._base / "root", self.ledger)
            life = self._draw(number)
            self._say_writable(life)
            number = self._live(number) + 1
            num_ends += 1
        self._close()
        return num_ends

    def _mount(self) -> None:
        if not (self.plan.is_small_disk and self._around.may_mount):
            return
        options = self._draw(0).options
        try:
            self._small_disk = SmallDisk(self._base, options.capacity_bytes // 2)
        except OSError:
            self._around.tally.add("small file systems that could not be mounted")

    def _say_writable(self, life: LifePlan) -> None:
        if self._small_disk is not None:
            self._small_disk.make_writable()
            (self._base / "somebody else's").unlink(missing_ok=True)
            if life.is_read_only_at_first:
                self._small_disk.make_read_only()

    def _close(self) -> None:
        if self._small_disk is not None:
            self._small_disk.close()
            self._small_disk = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def _draw(self, number: int) -> LifePlan:
        return draw_life(self.plan, number, self._around.mode)

    # One process.

    def _live(self, number: int) -> int:
        """Run lives in one process, from this one on. Returns the number of its last life."""
        script = Script()
        child = os.fork()
        if child == 0:
            os._exit(self._be_lives(number, script))
        status = self._wait(child, number, script)
        last, found = self._read(number, script)
        life = self._draw(last)
        if os.WIFSIGNALED(status):
            is_planned = os.WTERMSIG(status) == signal.SIGKILL and life.end in (End.KILL, End.KILL_IN_CALL)
            self._require(is_planned, "crashed", f"by signal {os.WTERMSIG(status)}: {self._stacks()}")
        elif os.WEXITSTATUS(status) == FOUND:
            raise SoakError(*found)
        else:
            is_stall = "Timeout" in self._stacks()
            self._require(not is_stall, "stalled", f"a call took over {self._around.watchdog_s} s: {self._stacks()}")
            self._require(os.WEXITSTATUS(status) == 0, "crashed", f"status {status}: {self._stacks()}")
        self._around.tally.add(f"ends: {life.end}")
        if life.end is End.POWER:
            self._lose_power(life)
        script.close()
        return last

    def _require(self, holds: bool, kind: str, detail: str) -> None:
        if not holds:
            raise SoakError(kind, detail)

    def _wait(self, child: int, number: int, script: Script) -> int:
        """Wait for the process and return its status. If planned, kill it at a certain line."""
        life = self._draw(number)
        while life.end is End.KILL:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
            if script.num_lines >= life.end_at:
                os.kill(child, signal.SIGKILL)
                break
            time.sleep(POLL_S)
        return os.waitpid(child, 0)[1]

    def _read(self, number: int, script: Script) -> tuple[int, tuple[str, str]]:
        """The number of the last life, and its finding."""
        last, found = 0, ("crashed", "no reason was reported")
        # For debugging a finding.
        (self.directory / f"script-{number}").write_text("\n".join(script.lines()))
        for line in read_script(self.ledger, script):
            verb, rest = line.split(" ", 1)
            if verb == "life":
                last = int(rest)
            elif verb == "found":
                found = msgspec.json.decode(rest, type=tuple[str, str])
        return last, found

    def _stacks(self) -> str:
        return (self.directory / "stacks").read_text()

    def _lose_power(self, life: LifePlan) -> None:
        shutil.rmtree(self._base / "root", ignore_errors=True)
        image = self._base / "image"
        if (image / "root").exists():
            (image / "root").rename(self._base / "root")
        shutil.rmtree(image)
        self.ledger.is_torn = True
        if life.options.fsync is not Fsync.ALWAYS:
            self._around.tally.add("chunks that a loss of power might take", len(self.ledger.must))
            self.ledger.must.clear()

    # In the child process.

    def _be_lives(self, number: int, script: Script) -> int:
        """Run lives one after the other while they end cleanly and memory does not grow. Returns an exit status."""
        log = Log(self.ledger, script)
        stacks = (self.directory / "stacks").open("w")
        faulthandler.enable(stacks)
        context = WorldContext(
            self._base,
            log,
            self._around.tally,
            stacks,
            self._small_disk,
            self._around.watchdog_s,
            self._around.sabotage,
            self._around.known,
        )
        log_to(self.directory / "engine.log")
        goes_on = Random(f"process {self.plan.seed} {number}").random() < 0.6
        memory: list[int] = []
        try:
            while True:
                log.note(f"life {number}")
                plan = self._draw(number)
                Life(self.plan, plan, context).run()
                if plan.end in (End.KILL, End.KILL_IN_CALL):
                    os.kill(os.getpid(), signal.SIGKILL)
                memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
                if memory[-1] - memory[0] > MOST_MEMORY_GROWTH_MIB:
                    raise SoakError("leaked", f"memory of one process grew, in MiB: {memory}")
                following = self._draw(number + 1)
                # A life that its parent kills, or that needs a prepared file system, gets its own process.
                is_alone = following.end is End.KILL or following.is_read_only_at_first
                if not goes_on or is_alone or number + 1 >= self.plan.num_lives:
                    return 0
                number += 1
        except SoakError as error:
            log.note(f"found {msgspec.json.encode([error.kind, str(error)]).decode()}")
            return FOUND
        except BaseException:
            stacks.write(traceback.format_exc())
            stacks.flush()
            return 1


def log_to(path: Path) -> None:
    """Write the log of the tiers to a file, for debugging a finding."""
    logger = logging.getLogger("hybridkv")
    logger.handlers = [logging.FileHandler(path)]
    logger.handlers[0].setFormatter(logging.Formatter("%(relativeCreated)d %(levelname)s %(message)s"))
    logger.setLevel(logging.INFO)
    logger.propagate = False
