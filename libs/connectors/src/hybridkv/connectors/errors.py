"""Errors in an operator's configuration."""

import difflib
from collections.abc import Sequence


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


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Hint for an unknown name: the nearest known name, if one is near, and all known names."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    everything = "known: " + ", ".join(known)
    return f'did you mean "{close[0]}"? {everything}' if close else everything
