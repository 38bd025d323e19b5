"""Applies each mutant separately to a copy of the last commit, and runs the tests that should detect it.

    python3 tests/mutants/run.py                  # all mutants: the tests of their library, then the whole first ring
    python3 tests/mutants/run.py --full           # also the full ring for mutants that the first ring misses
    python3 tests/mutants/run.py --named lease    # mutants with this word in their name

It prints one line per mutant, and exits with an error if the first ring misses more than `MOST_MISSED`, or if --full
misses one.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Final

from mutants import MUTANTS, Mutant

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
MOST_MISSED: Final = 1
"""How many mutants the first ring may miss."""
_PASSED, _FAILED = 0, 3
"""Bazel's exit codes for "all tests passed" and for "the build succeeded and a test failed"."""


class CannotTestError(Exception):
    """Bazel ran no tests: the mutant does not compile, or the unchanged tree is broken."""


def _is_found(tree: pathlib.Path, *arguments: str) -> bool:
    command = ["tools/bazel", "test", "--notest_keep_going", "--noshow_progress", "--test_output=summary", *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode not in (_PASSED, _FAILED):
        raise CannotTestError(f"exit code {done.returncode} of {' '.join(command)}\n{done.stderr[-3000:]}")
    return done.returncode == _FAILED


def _found_by(tree: pathlib.Path, mutant: Mutant, *, with_full: bool) -> str | None:
    """The command that found the mutant, or None if all tests pass."""
    first = ["--", "//...", "-//tests/mutants/..."]
    rings = [mutant.tests.split(), first] + ([["--config=full", *first]] if with_full else [])
    path = tree / mutant.path
    right = path.read_text()
    path.write_text(mutant.applied(right))
    try:
        return next((" ".join(ring) for ring in rings if _is_found(tree, *ring)), None)
    finally:
        path.write_text(right)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--named", default="")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.named in mutant.name]
    if not chosen:
        parser.error(f"no mutant has {options.named!r} in its name")
    num_missed_by_first = num_missed = 0
    with tempfile.TemporaryDirectory(prefix="hybridkv-mutants-") as folder:
        tree = pathlib.Path(folder, "tree")
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(tree)], check=True)
        try:
            for mutant in chosen:
                began_s = time.monotonic()
                found_by = _found_by(tree, mutant, with_full=options.full)
                num_missed += found_by is None
                num_missed_by_first += found_by is None or found_by.startswith("--config=full")
                took_s = time.monotonic() - began_s
                print(f"{mutant.name}: {found_by or 'NOT FOUND'} ({took_s:.0f} s)", flush=True)
        finally:
            subprocess.run(["tools/bazel", "clean", "--expunge"], cwd=tree, capture_output=True, check=False)
    print(f"{len(chosen) - num_missed_by_first} of {len(chosen)} found by the first ring")
    return int(num_missed_by_first > MOST_MISSED or (options.full and num_missed > 0))


if __name__ == "__main__":
    sys.exit(main())
