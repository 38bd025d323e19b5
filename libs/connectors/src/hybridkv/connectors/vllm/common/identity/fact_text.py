"""Canonical text of values: equal in every process, and different for different values.

The text is not JSON: an enumeration member, an element type and a path have other texts than a string with the same
letters. This module does not decide which values are facts.
"""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import PurePath
from typing import Any

from blake3 import blake3

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.identity.excluded import EXCLUDED_MODEL_KEYS


def is_model_settings(value: Any) -> bool:
    """Whether a value is a model configuration of the transformers library."""
    return any(base.__name__ in ("PretrainedConfig", "PreTrainedConfig") for base in type(value).__mro__)


def model_settings(path: str, value: Any) -> dict[str, Any]:
    """Settings of a model configuration, overrides included, without `EXCLUDED_MODEL_KEYS`.

    Raises:
        ConfigurationError: the configuration cannot be serialized.
    """
    try:
        found: Mapping[str, Any] = value.to_dict()
    except Exception as error:
        raise ConfigurationError(
            path, "a configuration that can be serialized", f"{type(error).__name__}: {error}", "report the model"
        ) from error
    return _without_origin(found)


def _without_origin(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_origin(v) for k, v in value.items() if k not in EXCLUDED_MODEL_KEYS}
    return [_without_origin(item) for item in value] if isinstance(value, list | tuple) else value


MAX_TEXT = 200
"""Maximum characters of a canonical text; a longer text is replaced by its digest."""


def text(path: str, value: Any) -> str:
    """Canonical text of a value, or the digest of a text longer than `MAX_TEXT`.

    Raises:
        ConfigurationError: the value, or a value in it, has a type without canonical text; the error names `path`.
    """
    whole = _text(path, value)
    return whole if len(whole) <= MAX_TEXT else digested(whole)


def secret_text(path: str, value: Any) -> str:
    """Digest of the canonical text, also of a short one: for values that may hold a credential. The canonical text of
    an empty value is not digested."""
    return digested(_text(path, value)) if value else _text(path, value)


def digested(whole: str) -> str:
    """Digest that replaces a long or secret text."""
    return "blake3:" + blake3(whole.encode(errors="surrogatepass")).hexdigest(16)


def parts(value: Any) -> dict[str, Any] | None:
    """Fields of a dataclass, a pydantic model or a model configuration; None for other values."""
    if isinstance(value, type):
        return None
    if is_model_settings(value):
        # Also a dataclass, but with values outside its fields.
        return model_settings(type(value).__name__, value)
    if is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    names = getattr(type(value), "model_fields", None)
    return {name: getattr(value, name) for name in names} if isinstance(names, Mapping) else None


def child(path: str, key: Any) -> str:
    """Path of the value under a key. Keys that are not plain names are quoted, so that paths are unique."""
    if isinstance(key, str) and re.fullmatch(r"[A-Za-z_][\w-]*", key):
        return f"{path}.{key}" if path else key
    return f"{path}[{_text(path, key)}]"


def _text(path: str, value: Any) -> str:
    for kinds, write in _KINDS:
        if isinstance(value, kinds):
            return write(path, value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    if (members := parts(value)) is not None:
        return type(value).__name__ + _mapping(path, members)
    return _by_name(path, value)


def _by_name(path: str, value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"partial({_text(path, value.func)}, {_text(path, value.args)}, {_text(path, value.keywords)})"
    name = getattr(value, "__qualname__", None)
    # Not lambdas, because two of them may have the same name. Not bound methods, because the name does not contain the
    # object.
    if callable(value) and name and "<lambda>" not in name and getattr(value, "__self__", None) is None:
        return f"{value.__module__}.{name}"
    raise ConfigurationError(
        path,
        "a value with a canonical text",
        f"{type(value).__module__}.{type(value).__qualname__}",
        f'if the cached content does not depend on it: "identity_ignores": ["{path}"]',
    )


def _mapping(path: str, value: Mapping[Any, Any]) -> str:
    return "{" + ", ".join(sorted(f"{_text(path, k)}: {_text(child(path, k), v)}" for k, v in value.items())) + "}"


def _sequence(path: str, value: Sequence[Any]) -> str:
    return "[" + ", ".join(_text(f"{path}[{i}]", item) for i, item in enumerate(value)) + "]"


def _set(path: str, value: Set[Any]) -> str:
    return "set {" + ", ".join(sorted(_text(path, item) for item in value)) + "}"


_KINDS: tuple[tuple[Any, Callable[[str, Any], str]], ...] = (
    (enum.Enum, lambda _, value: f"{type(value).__name__}.{value.name}"),
    ((bool, int, float, str, type(None)), lambda _, value: json.dumps(value)),
    (PurePath, lambda _, value: f"path {json.dumps(str(value))}"),
    ((bytes, bytearray), lambda _, value: f"bytes {bytes(value).hex()}"),
    (re.Pattern, lambda _, value: f"pattern {value.pattern!r} {value.flags}"),
    ((range, Fraction), lambda _, value: repr(value)),
    (type, lambda _, value: f"{value.__module__}.{value.__qualname__}"),
    (Mapping, _mapping),
    (Set, _set),
    (Sequence, _sequence),
)
