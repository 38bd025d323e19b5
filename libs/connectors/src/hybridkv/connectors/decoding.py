"""Decoding of an operator's configuration into a struct. An unknown key is an error that names its path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from hybridkv.connectors.errors import ConfigurationError, did_you_mean


def refuse_unknown_keys(
    path: str, raw: Mapping[str, Any], struct: type[msgspec.Struct], more_keys: tuple[str, ...] = ()
) -> None:
    """Refuses keys that are not fields of the struct.

    Args:
        path: path of `raw` in the configuration.
        raw: the operator's configuration.
        struct: struct with the known fields.
        more_keys: further keys that are allowed.

    Raises:
        ConfigurationError: a key is unknown; the hint names a similar known key.
    """
    known = [field.encode_name for field in msgspec.structs.fields(struct)] + list(more_keys)
    for key in raw:
        if key not in known:
            raise ConfigurationError(f"{path}.{key}", "a known key", "an unknown one", did_you_mean(str(key), known))


def as_configuration_error(
    error: msgspec.ValidationError, raw: Mapping[str, Any], root: str, choices: Mapping[str, str], page: str
) -> ConfigurationError:
    """Translates an error of msgspec into a `ConfigurationError`.

    Args:
        error: error of msgspec's conversion of `raw`.
        raw: the operator's configuration.
        root: path of `raw` in the configuration.
        choices: expected values by field name; they replace msgspec's description.
        page: documentation page that the hint names.
    """
    message, _, where = str(error).partition(" - at `$")
    path = root + where.rstrip("`")
    found: Any = raw
    for step in re.findall(r"\.([^.\[]+)|\[(\d+)\]", where.rstrip("`")):
        try:
            found = found[step[0]] if step[0] else found[int(step[1])]
        except (KeyError, IndexError, TypeError):
            break
    expected = re.sub(r"^Expected (.*?)(, got .*)?$", r"\1", message).replace("`", "")
    if required := re.match(r"Object missing required field (\S+)", expected):
        name = required[1].strip("`")
        return ConfigurationError(f"{path}.{name}", "a value", "nothing", f'add "{name}"')
    expected = choices.get(path.rpartition(".")[2], expected)
    return ConfigurationError(path, expected, repr(found), f"see {page}")
