"""A fleet over one object store tolerates an intruder, a sick host, a store in trouble, and kills.

`SOAK_MINUTES` sets the total duration.
"""

from __future__ import annotations

import os

from soak.fleet import END_S, RunResult, complaints, report, run

SECONDS = 60 * float(os.environ.get("SOAK_MINUTES", "1.5"))


def test_a_fleet_tolerates_intruders_sick_hosts_outages_and_kills() -> None:
    quiet = run(SECONDS / 4, 1, is_quiet=True)
    rough = run(3 * SECONDS / 4, 1, is_quiet=False)
    print("quiet", report(quiet), "rough", report(rough), sep="\n")
    assert complaints(quiet, rough) == []
    assert quiet.asked and rough.asked
    assert any(name.startswith("stranger: ") for name in rough.tally)


def test_each_violation_is_reported() -> None:
    """Negative control for the checks of a run."""
    good = RunResult(asked=1000, restored=950)
    assert complaints(good, RunResult(asked=1000, restored=935)) == []
    for bad in (
        RunResult(asked=1000, restored=920),
        RunResult(asked=1000, restored=950, wrong=1),
        RunResult(asked=1000, restored=950, most_grown=65 << 20),
        RunResult(asked=1000, restored=950, longest_end_s=END_S + 0.5),
    ):
        assert len(complaints(good, bad)) == 1
