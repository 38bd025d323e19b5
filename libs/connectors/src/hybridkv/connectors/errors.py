"""The one way in which an operator's mistake is reported."""

import difflib
from collections.abc import Sequence


class ConfigurationError(ValueError):
    """A setting that cannot work. Raised while the engine starts; nothing runs half-configured.

    Args:
        path: the setting, from the top of what the operator wrote.
        expected: what would have been right.
        got: what was found.
        hint: what to do next.
    """

    def __init__(self, path: str, expected: str, got: object, hint: str) -> None:
        super().__init__(f"{path}: expected {expected}, got {got}\nhint: {hint}")
        self.path = path
        self.expected = expected
        self.got = got
        self.hint = hint


class ManagerError(ConfigurationError, TypeError):
    """A connector of a type that the engine's hybrid KV cache manager cannot work with."""


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """A hint for a name that is not known: the nearest one, if one is near, and all that are."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    everything = "known: " + ", ".join(known)
    return f'did you mean "{close[0]}"? {everything}' if close else everything
