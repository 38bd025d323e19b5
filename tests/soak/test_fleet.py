"""A fleet over one object store comes through a stranger, a sick host, a store in trouble and kills.

`SOAK_MINUTES` says how long, together.
"""

from __future__ import annotations

import os

from soak.fleet import END_S, Found, complaints, report, run

SECONDS = 60 * float(os.environ.get("SOAK_MINUTES", "1.5"))


def test_a_fleet_comes_through_strangers_sick_hosts_trouble_and_kills() -> None:
    quiet = run(SECONDS / 4, 1, is_quiet=True)
    rough = run(3 * SECONDS / 4, 1, is_quiet=False)
    print("quiet", report(quiet), "rough", report(rough), sep="\n")
    assert complaints(quiet, rough) == []
    assert quiet.asked and rough.asked
    assert any(name.startswith("stranger: ") for name in rough.tally)


def test_each_promise_can_be_broken() -> None:
    """The negative control of what a run is judged by."""
    good = Found(asked=1000, restored=950)
    assert complaints(good, Found(asked=1000, restored=935)) == []
    for bad in (
        Found(asked=1000, restored=920),
        Found(asked=1000, restored=950, wrong=1),
        Found(asked=1000, restored=950, most_grown=65 << 20),
        Found(asked=1000, restored=950, longest_end_s=END_S + 0.5),
    ):
        assert len(complaints(good, bad)) == 1
