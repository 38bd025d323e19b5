"""Errors in an operator's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Literal

import msgspec


class ConfigurationError(ValueError):
    """A setting that cannot work. Raised while the engine starts; no connector runs half-configured.

    Args:
        path: path of the setting in the operator's configuration.
        expected: values that would work.
        got: value that was found.
        hint: what to do next.
    """

    def __init__(self, path: str, expected: str, got: object, hint: str) -> None:
        super().__init__(f"{path}: expected {expected}, got {got}\nhint: {hint}")
        self.path = path
        self.expected = expected
        self.got = got
        self.hint = hint


class ManagerError(ConfigurationError, TypeError):
    """The engine's hybrid KV cache manager cannot work with a connector of this type."""


class SettingProblem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finding about a setting.

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

    @classmethod
    def of(cls, error: ConfigurationError) -> SettingProblem:
        """The problem of a refused setting."""
        return cls("error", error.path, error.expected, str(error.got), error.hint)

    def text(self) -> str:
        """The problem for people, in the form of a ConfigurationError."""
        line = f"{self.severity}: {self.path}: expected {self.expected}, got {self.got}"
        return f"{line}\nhint: {self.hint}" if self.hint else line


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Hint for an unknown name: the nearest known name, if one is near, and all known names."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    everything = "known: " + ", ".join(known)
    return f'did you mean "{close[0]}"? {everything}' if close else everything


MAX_PRINTED = 120
"""Characters of a client's text in a log line."""


def printable(said: object) -> str:
    """A client's text for the log, such as a request id: shortened, and without characters that cannot be printed."""
    text = (said if isinstance(said, str) else repr(said))[:MAX_PRINTED]
    return "".join(char if char.isprintable() else "?" for char in text)
