"""The tiers tolerate all troubles of a soak, and a sabotaged soak reports the sabotage.

`SOAK_MINUTES` sets the total duration. With `SOAK_SEED=any` the second seed is random and printed.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import SystemRandom

import patience
import pytest

from soak.main import WATCHDOG_S, Run, report, run
from soak.plans import Mode
from soak.sabotage import EXPECTED, Sabotage
from soak.tally import Tally

MINUTES = float(os.environ.get("SOAK_MINUTES", "1.5"))
ANY_SEED = os.environ.get("SOAK_SEED") == "any"
NUM_ENDS = 12
"""Number of kills, and of losses of power, per minute."""
MODES = {Sabotage.UNSYNCED: Mode.LOSSES, Sabotage.FORGET: Mode.KILLS, Sabotage.MISCOUNT: Mode.KILLS}
"""For controls that need lives of one kind."""


def require_nothing_found(what: Run, directory: Path) -> Tally:
    tally = Tally()
    found = run(what, directory, tally)
    text = report(what, tally, found, directory)
    print(text)
    assert found is None, text
    return tally


def test_no_chunk_is_lost_or_wrong_and_no_call_stalls(tmp_path: Path) -> None:
    tally = require_nothing_found(Run(seed=1, minutes=MINUTES / 2 * patience.slowness()), tmp_path)
    assert {"chunks served", "chunks audited", "promote done", "cascade done"} <= tally.all().keys()


def test_no_chunk_is_lost_or_wrong_and_no_call_stalls_with_another_seed(tmp_path: Path) -> None:
    seed = SystemRandom().getrandbits(32) if ANY_SEED else 4
    require_nothing_found(Run(seed=seed, minutes=MINUTES / 4), tmp_path)


@pytest.mark.parametrize("mode", [Mode.KILLS, Mode.LOSSES])
def test_kills_and_losses_of_power_lose_no_chunk(mode: Mode, tmp_path: Path) -> None:
    tally = require_nothing_found(Run(seed=2, minutes=60, mode=mode, most_ends=int(NUM_ENDS * MINUTES)), tmp_path)
    assert tally.get("chunks found at openings")


@pytest.mark.parametrize("sabotage", EXPECTED)
def test_sabotage_is_detected(sabotage: Sabotage, tmp_path: Path) -> None:
    mode = MODES.get(sabotage, Mode.SOAK)
    watchdog_s = 3.0 if sabotage is Sabotage.HANG else WATCHDOG_S
    what = Run(seed=3, minutes=patience.seconds(12.0) / 60, mode=mode, sabotage=sabotage, watchdog_s=watchdog_s)
    found = run(what, tmp_path, Tally())
    assert found is not None, "the sabotage was not detected"
    assert found.kind == EXPECTED[sabotage], found


def test_a_report_contains_the_command_to_repeat_a_finding(tmp_path: Path) -> None:
    what = Run(seed=3, sabotage=Sabotage.CRASH)
    tally = Tally()
    found = run(what, tmp_path, tally)
    assert found is not None
    assert "--seed 3 --world 0" in report(what, tally, found, tmp_path)
