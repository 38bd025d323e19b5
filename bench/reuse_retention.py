"""What each retention heuristic of states is worth: `reuse_traces.py`'s planner, with answers, and one heuristic on.

`none` lets nothing go first; of an answer the newest state replaces the one before. `all` has every heuristic, as the
connector. What stands behind a `+` is `none` and that heuristic.

    python bench/reuse_retention.py FOLDER NAME SIZE...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from reuse_files import Trace, read_all, read_all_answered
from reuse_policies import Budgeted
from reuse_simulation import CostModel, simulate, unique_chunks

HEURISTICS: Final = frozenset({"unproven_stops", "unproven_answers", "ends", "outgrown"})
COSTS: Final = CostModel()


def rate(
    trace: Trace, size: float, without: frozenset[str], *, stranded: bool = False, supersede: str | None = "invalidate"
) -> float:
    capacity = int(unique_chunks(trace, COSTS) * size / 100)
    policy = Budgeted(trace, capacity, COSTS, 1 << 18, retains="outgrown" not in without, without=without)
    outcome = simulate(trace, capacity, COSTS, policy, gives_up_stranded=stranded, supersede=supersede)
    return round(100 * outcome.hit_rate, 2)


def main() -> None:
    folder, name, sizes = Path(sys.argv[1]), sys.argv[2], [float(each) for each in sys.argv[3:]]
    for kind, traces in (("answers", read_all_answered(folder)), ("prompts", read_all(folder))):
        (trace,) = (each for each in traces if each.name == name)
        for size in sizes:
            row = {
                "all": rate(trace, size, frozenset(), stranded=True, supersede="demote"),
                "none": rate(trace, size, HEURISTICS),
                "+outgrown": rate(trace, size, HEURISTICS - {"outgrown"}),
                "+unproven stops": rate(trace, size, HEURISTICS - {"unproven_stops"}),
            }
            if kind == "answers":
                row |= {
                    "+stranded": rate(trace, size, HEURISTICS, stranded=True),
                    "+ends": rate(trace, size, HEURISTICS - {"ends"}),
                    "+unproven answers": rate(trace, size, HEURISTICS - {"unproven_answers"}),
                    "demoted, not replaced": rate(trace, size, HEURISTICS, supersede="demote"),
                    "older states stay": rate(trace, size, HEURISTICS, supersede=None),
                    "no admission": rate(trace, size, HEURISTICS | {"admission"}),
                }
            print(name, kind, size, row, flush=True)


if __name__ == "__main__":
    main()
