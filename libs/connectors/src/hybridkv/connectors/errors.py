"""Errors in an operator's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Literal

import msgspec


class ConfigurationError(ValueError):
    """A setting, file, model, device, engine or hint with which a connector cannot work. It stops the engine's start,
    except for a hint of a request: that hint is ignored.

    Args:
        path: path of the setting in the operator's configuration, or name of the file or property.
        expected: values that would work.
        got: value that was found.
        hint: next step for the operator.
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
    """Error or warning about one setting.

    Args:
        severity: "error": an engine refuses to start; "warning": the engine starts, but the setting is probably a
            mistake.
        path: path of the setting, or the file.
        expected: valid values, in words.
        got: value that was found.
        hint: next step for the operator.
    """

    severity: Literal["error", "warning"]
    path: str
    expected: str
    got: str
    hint: str = ""

    @classmethod
    def of(cls, error: ConfigurationError) -> SettingProblem:
        """Converts an error to a problem."""
        return cls("error", error.path, error.expected, str(error.got), error.hint)

    def text(self) -> str:
        """Text of the problem for the operator, in the form of a `ConfigurationError`."""
        line = f"{self.severity}: {self.path}: expected {self.expected}, got {self.got}"
        return f"{line}\nhint: {self.hint}" if self.hint else line


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Hint for an unknown name: a similar known name, if there is one, and all known names."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    everything = "known: " + ", ".join(known)
    return f'did you mean "{close[0]}"? {everything}' if close else everything


MAX_PRINTED = 120
"""Maximum characters of a client's text in a log line."""


def printable(said: object) -> str:
    """A client's text for the log, such as a request id: shortened, with "?" for characters that cannot be printed."""
    text = (said if isinstance(said, str) else repr(said))[:MAX_PRINTED]
    return "".join(char if char.isprintable() else "?" for char in text)
