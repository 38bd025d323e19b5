"""Runs worlds until the time is over or there is a finding. `tools/bazel run //tests/soak -- --minutes 60 --seed 7`.

Prints counts and the seed to stdout. A finding reports how to rerun its world, and keeps its directory.
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
    """The parameters of a run.

    Args:
        seed: determines all random choices.
        minutes: no life begins after this time.
        mode: the kinds of lives.
        most_ends: the run ends after this many ends; 0: no limit.
        only_world: run only this world; None: run one world after the other.
        sabotage: for negative controls.
        watchdog_s: a call that takes longer counts as stalled.
        known: kinds of findings that are counted and do not end the run.
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
    """Run worlds. Returns the finding, or None."""
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
    """The result as lines of text."""
    lines = [f"{count:>12,}  {name}" for name, count in sorted(tally.all().items())]
    lines.append(f"        seed  {what.seed}")
    if found is None:
        lines.append("no chunk was lost, no byte was wrong, no call stalled")
    else:
        again = f"--seed {what.seed} --world {found.world} --mode {what.mode}"
        lines += [f"FOUND {found}", f"again: {again}", f"directory: {directory}"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long")
    parser.add_argument("--seed", type=int, help="seed of the whole run; random by default")
    parser.add_argument("--world", type=int, help="run only this world, as reported with a finding")
    parser.add_argument("--mode", type=Mode, choices=list(Mode), default=Mode.SOAK, help="kinds of lives")
    parser.add_argument(
        "--kills", type=int, default=0, help="run this many kills and nothing else, without a time limit"
    )
    parser.add_argument(
        "--losses", type=int, default=0, help="run this many losses of power and nothing else, without a time limit"
    )
    parser.add_argument("--sabotage", type=Sabotage, choices=list(Sabotage), default=Sabotage.NONE, help="be caught")
    parser.add_argument("--watchdog", type=float, default=WATCHDOG_S, help="maximal seconds per call")
    parser.add_argument("--known", nargs="*", default=[], help="findings, such as `hidden`, that do not end the run")
    parser.add_argument("--directory", type=Path, help="directory of the stores; temporary by default")
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
