"""Facts that an operator leaves out by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError, did_you_mean


def names(pattern: str, name: str) -> bool:
    """Whether a pattern (`*` stands for anything) names a fact, or something that the fact is a part of."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") or fnmatchcase(name, f"{pattern}[[]*")


def without_ignored(facts: Mapping[str, str], ignores: Sequence[str]) -> dict[str, str]:
    """The facts but for those that `identity_ignores` names, each by its name or by the start of it.

    Raises:
        ConfigurationError: an entry names no fact.
    """
    for i, pattern in enumerate(ignores):
        if not any(names(pattern, name) for name in facts):
            raise ConfigurationError(
                f"{ROOT}.identity_ignores[{i}]", "the name of a fact", repr(pattern), did_you_mean(pattern, list(facts))
            )
    return {name: text for name, text in facts.items() if not any(names(pattern, name) for pattern in ignores)}
