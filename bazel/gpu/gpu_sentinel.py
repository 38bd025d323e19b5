"""Lists the GPU tests that did not run on this machine, with reasons. Parses BUILD files as Python.

Bazel's summary shows only that a gpu_test was skipped. This target always runs: it lists the skipped tests, and reports
each as skipped in its XML. It fails if it finds no gpu_test at all, since then it reads the wrong files, and with
`--config=gpu` if a test did not run.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class GpuTest:
    label: str
    gpus: int
    needs: tuple[str, ...] = ()
    """Its constraints other than GPUs."""


@dataclass(frozen=True)
class Machine:
    """Facts that `local_gpus` found."""

    gpus: int
    why_no_gpu: str = ""
    why_not: dict[str, str] = field(default_factory=dict)
    """For each constraint, the reason why this machine does not satisfy it; empty if it does."""

    def why_not_run(self, test: GpuTest) -> str:
        """Reason why the test does not run here; empty if it runs. An unknown constraint counts as not satisfied."""
        reasons = []
        if test.gpus > self.gpus:
            reasons.append(self.why_no_gpu or f"needs {test.gpus} GPUs, and there are {self.gpus}")
        reasons += filter(None, (self.why_not.get(need, f"{need} is unknown") for need in test.needs))
        return "; ".join(reasons)


def gpu_tests(root: Path) -> list[GpuTest]:
    """All gpu_tests below `root`, found by the calls in BUILD files."""
    found = []
    for path in sorted(root.rglob("BUILD.bazel")):
        package = path.parent.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "gpu_test":
                arguments = {word.arg: word.value for word in node.keywords}
                gpus = ast.literal_eval(arguments["gpus"]) if "gpus" in arguments else 1
                needs = tuple(ast.literal_eval(arguments.get("target_compatible_with", ast.Tuple([]))))
                found.append(GpuTest(f"//{package}:{ast.literal_eval(arguments['name'])}", gpus, needs))
    return found


def report(tests: list[GpuTest], machine: Machine) -> tuple[str, ET.Element]:
    """Returns the lines to print, and the JUnit XML."""
    reasons = {test.label: machine.why_not_run(test) for test in tests}
    skipped = {label: reason for label, reason in reasons.items() if reason}
    suite = ET.Element("testsuite", name="gpu_sentinel", tests=str(len(tests)), skipped=str(len(skipped)))
    for test in tests:
        case = ET.SubElement(suite, "testcase", classname="gpu_sentinel", name=test.label)
        if test.label in skipped:
            ET.SubElement(case, "skipped", message=skipped[test.label])
    lines = [f"{len(skipped)} of {len(tests)} GPU test targets did NOT run here: {machine.gpus} GPUs"]
    lines += [f"  {label} {reason}" for label, reason in skipped.items()]
    return "\n".join(lines), suite


def main() -> int:
    machine = Machine(**json.loads(Path(sys.argv[1]).read_text()))
    tests = gpu_tests(Path.cwd())
    text, suite = report(tests, machine)
    print(text)
    if output := os.environ.get("XML_OUTPUT_FILE"):
        ET.ElementTree(suite).write(output)
    is_required = os.environ.get("HYBRIDKV_GPUS") == "required"
    return 1 if not tests or (is_required and suite.get("skipped") != "0") else 0


if __name__ == "__main__":
    sys.exit(main())
