"""Writes the table of test costs in docs/building.md from Bazel's event log.

    tools/bazel test --nocache_test_results --build_event_json_file=/tmp/events.json //...
    python3 tools/suite_cost.py /tmp/events.json

Seconds are wall time, summed over the shards and repeated runs of a target. `tests/e2e/harness.py` writes a line for
each start of an engine into the outputs of a test. A target of `LONG_S` or more needs a reason in `REASONS`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import urllib.parse
import zipfile
from dataclasses import dataclass
from typing import Final

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs/building.md"
BEGIN, END = "<!-- suite costs -->\n", "<!-- end of suite costs -->\n"

LONG_S: Final = 60
"""Seconds from which a target has a row of its own, and needs a reason."""

REASONS: Final = {
    "//libs/connectors:connectors_test": "about 2,500 tests, many of them with vLLM's scheduler",
    "//libs/tiers:tiers_test": "about 2,700 tests of tiers, with files and sockets",
    "//tests/e2e:offload_test": "three models; each set of options needs an engine of its own",
    "//tests/e2e:restart_test": "a kill or a restart ends the engine's process",
    "//tests/e2e:server_test": "installs the wheels in a new environment, and starts vLLM's server",
    "//tests/oracle:lmcache_0_5_7rc2_test": "scenarios in which deliberate mistakes must be found, with a real server",
    "//tests/oracle:oracle_test": "scenarios in which deliberate mistakes must be found",
}


@dataclass(slots=True)
class Cost:
    """Cost of one target."""

    seconds: float = 0.0
    num_shards: int = 0
    num_engine_starts: int = 0


def _num_engine_starts(outputs: list[dict[str, str]]) -> int:
    for output in outputs:
        if not output["name"].endswith("outputs.zip"):
            continue
        with zipfile.ZipFile(urllib.parse.urlparse(output["uri"]).path) as archive:
            if "engine_starts" in archive.namelist():
                return len(archive.read("engine_starts").splitlines())
    return 0


def read_costs(events: pathlib.Path) -> dict[str, Cost]:
    """The cost of each target in Bazel's event log. Cached results count with the cost of their run."""
    costs: dict[str, Cost] = {}
    for line in events.read_text().splitlines():
        event = json.loads(line)
        if "testResult" not in event:
            continue
        result = event["testResult"]
        if result["status"] == "NO_STATUS":
            continue
        cost = costs.setdefault(event["id"]["testResult"]["label"], Cost())
        cost.seconds += int(result["testAttemptDurationMillis"]) / 1000
        cost.num_shards += 1
        cost.num_engine_starts += _num_engine_starts(result.get("testActionOutput", []))
    return costs


def table(costs: dict[str, Cost]) -> str:
    """A row for each long target, and one row for the others.

    Raises:
        SystemExit: a long target has no reason.
    """
    rows = ["| target | seconds | shards | engine starts | why it is long |", "| --- | --- | --- | --- | --- |"]
    others = []
    for label, cost in sorted(costs.items(), key=lambda item: -item[1].seconds):
        if cost.seconds < LONG_S:
            others.append(cost)
        elif label not in REASONS:
            raise SystemExit(f"{label} took {cost.seconds:.0f} s; make it shorter, or give a reason in {__file__}")
        else:
            starts = cost.num_engine_starts or ""
            rows.append(f"| {label} | {cost.seconds:.0f} | {cost.num_shards} | {starts} | {REASONS[label]} |")
    seconds = sum(cost.seconds for cost in others)
    starts = sum(cost.num_engine_starts for cost in others)
    rows.append(f"| {len(others)} others | {seconds:.0f} | {sum(cost.num_shards for cost in others)} | {starts} | |")
    total = sum(cost.seconds for cost in costs.values())
    starts = sum(cost.num_engine_starts for cost in costs.values())
    rows.append(f"| all {len(costs)} targets | {total:.0f} | | {starts} | |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=pathlib.Path, help="the file that --build_event_json_file names")
    parser.add_argument("--print", action="store_true", help="print the table; leave the page as it is")
    options = parser.parse_args()
    text = table(read_costs(options.events))
    if options.print:
        print(text, end="")
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + text + END + after)


if __name__ == "__main__":
    main()
