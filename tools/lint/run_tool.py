"""Runs a lint tool on this test's copy of the tree.

    run_tool.py [--suffix=.py ...] TOOL [ARGUMENT ...]

TOOL is the path of a program if it contains a slash, else a Python module. With --suffix, all files of the tree with
that suffix are appended. Otherwise the tool finds its files through the root pyproject.toml.
"""

import argparse
import os
import pathlib
import runpy
import subprocess
import sys


def _files(suffixes: tuple[str, ...]) -> list[str]:
    found = (pathlib.Path(folder, name) for folder, _, names in os.walk(".") for name in names)
    return sorted(str(path) for path in found if path.name.endswith(suffixes))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--suffix", action="append", default=[])
    parser.add_argument("tool")
    options, arguments = parser.parse_known_args()
    if options.suffix:
        files = _files(tuple(options.suffix))
        if not files:
            sys.exit(f"run_tool: no file of this tree ends in {' or '.join(options.suffix)}")
        arguments += files
    if "/" in options.tool:
        return subprocess.run([options.tool, *arguments], check=False).returncode
    sys.argv = [options.tool, *arguments]
    runpy.run_module(options.tool, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
