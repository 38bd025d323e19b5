"""Answers of commands: problems for people or as JSON, and exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

FINE: Final = 0
WARNED: Final = 1
FAILED: Final = 2
"""Exit status: an engine would refuse, or the command could not run."""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finding for an operator.

    Args:
        severity: "error" if an engine refuses, "warning" if it starts and does less than the operator expects.
        path: the setting or the file.
        expected: a valid value, in words.
        got: the value that was found.
        hint: the next step.
    """

    severity: Literal["error", "warning"]
    path: str
    expected: str
    got: str
    hint: str = ""

    def text(self) -> str:
        """The problem for people, in the form of a ConfigurationError."""
        line = f"{self.severity}: {self.path}: expected {self.expected}, got {self.got}"
        return f"{line}\nhint: {self.hint}" if self.hint else line


class ReportError(ValueError):
    """A command has nothing to report.

    Args:
        problem: the reason.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text())
        self.problem = problem


def status_of(problems: Sequence[Problem]) -> int:
    """Exit status for these problems."""
    if any(problem.severity == "error" for problem in problems):
        return FAILED
    return WARNED if problems else FINE


def print_json(value: Any) -> None:
    """Writes one JSON document to stdout."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.write(f"{text.decode()}\n")


def as_problem(error: Exception) -> Problem | None:
    """The problem that an error of a setting or of the system describes; None for any other error."""
    if isinstance(error, ReportError):
        return error.problem
    if isinstance(error, UnicodeDecodeError):
        return Problem("error", "the file", "text in UTF-8", str(error))
    if isinstance(error, OSError):
        return Problem("error", str(error.filename or "?"), "a readable file", error.strerror or str(error))
    fields = [getattr(error, name, None) for name in ("path", "expected", "got", "hint")]
    fields[0] = fields[0] or getattr(error, "field", None)  # of a TierConfigurationError
    return None if fields[0] is None else Problem("error", *(str(field) for field in fields))
