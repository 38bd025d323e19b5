"""Facts that an operator leaves out by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError, did_you_mean


def is_named(entry: str, name: str) -> bool:
    """Whether an entry names a fact, or something that the fact is a part of. In an entry `*` stands for anything."""
    pattern = ".*".join(re.escape(piece) for piece in entry.split("*"))
    return re.fullmatch(rf"{pattern}([.\[].*)?", name, re.DOTALL) is not None


def without_ignored(facts: Mapping[str, str], ignores: Sequence[str]) -> dict[str, str]:
    """The facts but for those that `identity_ignores` names, each by its name or by the start of it.

    Raises:
        ConfigurationError: an entry names no fact.
    """
    for i, entry in enumerate(ignores):
        if not any(is_named(entry, name) for name in facts):
            raise ConfigurationError(
                f"{ROOT}.identity_ignores[{i}]",
                "the name of something that the identity of this engine's cache takes in",
                repr(entry),
                did_you_mean(entry, sorted(facts)),
            )
    return {name: value for name, value in facts.items() if not any(is_named(entry, name) for entry in ignores)}
