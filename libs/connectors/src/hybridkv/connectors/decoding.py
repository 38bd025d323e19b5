"""From what an operator wrote to a struct: what is not understood is said by its path, and never passed over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from hybridkv.connectors.errors import ConfigurationError, did_you_mean


def refuse_unknown_keys(
    path: str, raw: Mapping[str, Any], struct: type[msgspec.Struct], also: tuple[str, ...] = ()
) -> None:
    """Refuse what no field is called by.

    Args:
        path: of `raw` in the configuration.
        raw: what the operator wrote.
        struct: whose fields it has.
        also: names that are allowed besides.

    Raises:
        ConfigurationError: names the key, and the one that is meant.
    """
    known = [field.encode_name for field in msgspec.structs.fields(struct)] + list(also)
    for key in raw:
        if key not in known:
            raise ConfigurationError(f"{path}.{key}", "a known key", "an unknown one", did_you_mean(str(key), known))


def as_configuration_error(
    error: msgspec.ValidationError, raw: Mapping[str, Any], root: str, choices: Mapping[str, str], page: str
) -> ConfigurationError:
    """The same mistake in an operator's words.

    Args:
        error: of msgspec, over `raw`.
        raw: what the operator wrote.
        root: its path.
        choices: what is expected of fields of which msgspec cannot say it well.
        page: that explains.
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
