"""Writes the table of test costs in docs/building.md from Bazel's event log.

    tools/bazel test --nocache_test_results --build_event_json_file=/tmp/events.json //...
    python3 tools/suite_cost.py /tmp/events.json

Seconds are wall time, summed over the shards and repeated runs of a target. `tests/e2e/harness.py` writes a line for
each start of an engine into the outputs of a test.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import urllib.parse
import zipfile
from dataclasses import dataclass

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs/building.md"
BEGIN, END = "<!-- suite costs -->\n", "<!-- end of suite costs -->\n"


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


def table(costs: dict[str, Cost], smallest_s: float) -> str:
    """Rows of targets that took at least `smallest_s`, and one row for the rest."""
    rows = ["| target | seconds | shards | engine starts |", "| --- | --- | --- | --- |"]
    rest = Cost()
    num_rest = 0
    for label, cost in sorted(costs.items(), key=lambda item: -item[1].seconds):
        if cost.seconds < smallest_s:
            rest.seconds += cost.seconds
            rest.num_shards += cost.num_shards
            num_rest += 1
            continue
        rows.append(f"| {label} | {cost.seconds:.0f} | {cost.num_shards} | {cost.num_engine_starts or ''} |")
    rows.append(f"| {num_rest} others, below {smallest_s:.0f} s each | {rest.seconds:.0f} | {rest.num_shards} | |")
    total = sum(cost.seconds for cost in costs.values())
    starts = sum(cost.num_engine_starts for cost in costs.values())
    rows.append(f"| all {len(costs)} targets | {total:.0f} | | {starts} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=pathlib.Path, help="the file that --build_event_json_file names")
    parser.add_argument("--smallest-s", type=float, default=10.0, help="targets below this share a row")
    parser.add_argument("--print", action="store_true", help="print the table; leave the page as it is")
    options = parser.parse_args()
    text = table(read_costs(options.events), options.smallest_s)
    if options.print:
        print(text, end="")
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + text + END + after)


if __name__ == "__main__":
    main()
