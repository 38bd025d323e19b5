"""Says how many GPU tests did not run here, and why. BUILD files are read as what they nearly are: Python.

A gpu_test that Bazel skips leaves only a word in Bazel's summary. This target always runs: it lists them, and reports
each as skipped in its XML. It fails where it finds no gpu_test at all, since then it looks in the wrong place.
"""

from __future__ import annotations

import ast
import os
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GpuTest:
    label: str
    gpus: int


def gpu_tests(root: Path) -> list[GpuTest]:
    """Every gpu_test below `root`, by the calls in its BUILD files."""
    found = []
    for path in sorted(root.rglob("BUILD.bazel")):
        package = path.parent.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "gpu_test":
                arguments = {word.arg: word.value for word in node.keywords}
                gpus = ast.literal_eval(arguments["gpus"]) if "gpus" in arguments else 1
                found.append(GpuTest(f"//{package}:{ast.literal_eval(arguments['name'])}", gpus))
    return found


def report(tests: list[GpuTest], gpus: int, reason: str) -> tuple[str, ET.Element]:
    """The line for a reader, and the XML for a machine."""
    skipped = [test for test in tests if test.gpus > gpus]
    suite = ET.Element("testsuite", name="gpu_sentinel", tests=str(len(tests)), skipped=str(len(skipped)))
    for test in tests:
        case = ET.SubElement(suite, "testcase", classname="gpu_sentinel", name=test.label)
        if test in skipped:
            why = reason or f"needs {test.gpus} GPUs, and there are {gpus}"
            ET.SubElement(case, "skipped", message=why)
    lines = [f"{len(skipped)} of {len(tests)} GPU test targets did NOT run here: {reason or f'{gpus} GPUs'}"]
    lines += [f"  {test.label} needs {test.gpus}" for test in skipped]
    return "\n".join(lines), suite


def main() -> int:
    count, reason, *_ = [*Path(sys.argv[1]).read_text().splitlines(), ""]
    tests = gpu_tests(Path.cwd())
    text, suite = report(tests, int(count), reason)
    print(text)
    if output := os.environ.get("XML_OUTPUT_FILE"):
        ET.ElementTree(suite).write(output)
    return 0 if tests else 1


if __name__ == "__main__":
    sys.exit(main())
