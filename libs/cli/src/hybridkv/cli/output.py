"""Output of commands: problems as text or JSON, and the exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from hybridkv.connectors.errors import SettingProblem

FINE: Final = 0
WARNED: Final = 1
FAILED: Final = 2
"""Exit status: an engine would refuse the configuration, or the command could not run."""


class ReportError(ValueError):
    """A command cannot make its report.

    Args:
        problem: the reason.
    """

    def __init__(self, problem: SettingProblem) -> None:
        super().__init__(problem.text())
        self.problem = problem


def status_of(problems: Sequence[SettingProblem]) -> int:
    """Exit status for these problems."""
    if any(problem.severity == "error" for problem in problems):
        return FAILED
    return WARNED if problems else FINE


def print_json(value: Any) -> None:
    """Writes one JSON document to stdout."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.write(f"{text.decode()}\n")


def as_problem(error: Exception) -> SettingProblem | None:
    """Problem that describes an error of a setting or of the operating system; None for any other error."""
    if isinstance(error, ReportError):
        return error.problem
    if isinstance(error, UnicodeDecodeError):
        return SettingProblem("error", "the file", "text in UTF-8", str(error))
    if isinstance(error, OSError):
        return SettingProblem("error", str(error.filename or "?"), "a readable file", error.strerror or str(error))
    fields = [getattr(error, name, None) for name in ("path", "expected", "got", "hint")]
    fields[0] = fields[0] or getattr(error, "field", None)  # `field` of a TierConfigurationError
    return None if fields[0] is None else SettingProblem("error", *(str(field) for field in fields))
