"""Runs worlds until the time is over or something is found. `tools/bazel run //tests/soak -- --minutes 60 --seed 7`.

On stdout: what was done, and the seed. A finding says how to run its world again, and leaves its directory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from random import SystemRandom
from typing import NamedTuple

import patience

from soak.findings import SoakError
from soak.plans import Mode
from soak.sabotage import Sabotage
from soak.small_disk import enter_mount_namespace
from soak.tally import Tally
from soak.world import Surroundings, World

WATCHDOG_S = patience.seconds(6.0)


class Run(NamedTuple):
    """What is to be run.

    Args:
        seed: of everything.
        minutes: after which no life begins any more.
        mode: which lives there are.
        most_ends: after so many the run is over; 0: when the time is.
        only_world: this one alone; None: one after the other.
        sabotage: for negative controls.
        watchdog_s: how long a call may take before it counts as one that never ends.
        known: kinds of findings that are counted, where they need not end the run.
    """

    seed: int
    minutes: float = 2.0
    mode: Mode = Mode.SOAK
    most_ends: int = 0
    only_world: int | None = None
    sabotage: Sabotage = Sabotage.NONE
    watchdog_s: float = WATCHDOG_S
    known: frozenset[str] = frozenset()


def run(what: Run, directory: Path, tally: Tally) -> SoakError | None:
    """What was found, and None if nothing was."""
    may_mount = enter_mount_namespace()
    around = Surroundings(directory, what.mode, tally, may_mount, what.watchdog_s, what.sabotage, what.known)
    deadline_s = time.monotonic() + 60 * what.minutes
    number = what.only_world or 0
    num_ends = 0
    most_ends = what.most_ends or 1 << 40
    while time.monotonic() < deadline_s and num_ends < most_ends:
        tally.add("worlds")
        try:
            num_ends += World(f"{what.seed} {number}", around).run(deadline_s, most_ends - num_ends)
        except SoakError as error:
            error.world = number
            return error
        if what.only_world is not None:
            break
        number += 1
    return None


def report(what: Run, tally: Tally, found: SoakError | None, directory: Path) -> str:
    """Lines for a person."""
    lines = [f"{count:>12,}  {name}" for name, count in sorted(tally.all().items())]
    lines.append(f"        seed  {what.seed}")
    if found is None:
        lines.append("nothing was lost, nothing was wrong, nothing stood still")
    else:
        again = f"--seed {what.seed} --world {found.world} --mode {what.mode}"
        lines += [f"FOUND {found}", f"again: {again}", f"what it left: {directory}"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long")
    parser.add_argument("--seed", type=int, help="of everything; if it is not given, another one each time")
    parser.add_argument("--world", type=int, help="this world alone, as a finding names it")
    parser.add_argument("--mode", type=Mode, choices=list(Mode), default=Mode.SOAK, help="which lives there are")
    parser.add_argument("--kills", type=int, default=0, help="nothing but so many kills, without a limit of time")
    parser.add_argument("--losses", type=int, default=0, help="nothing but so many losses of power, likewise")
    parser.add_argument("--sabotage", type=Sabotage, choices=list(Sabotage), default=Sabotage.NONE, help="be caught")
    parser.add_argument("--watchdog", type=float, default=WATCHDOG_S, help="seconds that a call may take")
    parser.add_argument("--known", nargs="*", default=[], help="findings, such as `hidden`, that do not end the run")
    parser.add_argument("--directory", type=Path, help="where the stores are; a temporary one if it is not given")
    arguments = parser.parse_args()
    seed = SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir=arguments.directory))
    mode = Mode.KILLS if arguments.kills else Mode.LOSSES if arguments.losses else arguments.mode
    most_ends = arguments.kills or arguments.losses
    minutes = 1e6 if most_ends else arguments.minutes
    known = frozenset(arguments.known)
    what = Run(seed, minutes, mode, most_ends, arguments.world, arguments.sabotage, arguments.watchdog, known)
    print(f"seed {seed}", file=sys.stderr, flush=True)
    tally = Tally()
    found = run(what, directory, tally)
    print(report(what, tally, found, directory))
    if found is None:
        shutil.rmtree(directory, ignore_errors=True)
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main())
