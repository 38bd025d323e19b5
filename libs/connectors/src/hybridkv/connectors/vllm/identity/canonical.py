"""Values as canonical text: the same in every process, and no two values alike."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

from blake3 import blake3

from hybridkv.connectors.errors import ConfigurationError

MAX_TEXT = 200


def text(path: str, value: Any) -> str:
    """The canonical text of a value; of a long one its digest.

    Raises:
        ConfigurationError: it is of a type that has none.
    """
    whole = _text(path, value)
    return whole if len(whole) <= MAX_TEXT else digested(whole)


def digested(whole: str) -> str:
    """What stands for a text that is long, or nobody's business."""
    return "blake3:" + blake3(whole.encode(errors="surrogatepass")).hexdigest(16)


def _text(path: str, value: Any) -> str:
    for kinds, write in _KINDS:
        if isinstance(value, kinds):
            return write(path, value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    raise ConfigurationError(
        path, "a value that can be written down", type(value).__name__, "report it; identity_ignores can leave it out"
    )


def _mapping(path: str, value: Mapping[Any, Any]) -> str:
    return "{" + ", ".join(sorted(f"{_text(path, k)}: {_text(path, v)}" for k, v in value.items())) + "}"


_KINDS: tuple[tuple[Any, Callable[[str, Any], str]], ...] = (
    (enum.Enum, lambda _, value: f"{type(value).__name__}.{value.name}"),
    ((bool, int, float, str, type(None)), lambda _, value: json.dumps(value)),
    (PurePath, lambda _, value: f"path {json.dumps(str(value))}"),
    ((bytes, bytearray), lambda _, value: f"bytes {bytes(value).hex()}"),
    (type, lambda _, value: f"{value.__module__}.{value.__qualname__}"),
    (Mapping, _mapping),
    (Set, lambda path, value: "{" + ", ".join(sorted(_text(path, item) for item in value)) + "}"),
    (Sequence, lambda path, value: "[" + ", ".join(_text(path, item) for item in value) + "]"),
)
