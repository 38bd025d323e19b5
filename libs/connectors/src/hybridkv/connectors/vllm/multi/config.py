"""What an operator says to HybridMultiConnector, decoded strictly. Knows no engine; children decode their own keys."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError, did_you_mean
from hybridkv.metrics import MAX_CHILDREN
from hybridkv.planner import Weight, is_weight

MULTI_CONNECTORS: Final = ("HybridMultiConnector", "MultiConnector")
DEFAULT_LOOKUP_TIMEOUT_S: Final = 1.0
DEFAULT_WEIGHT: Final = 1.0
_KEYS: Final = ("connectors", "lookup_timeout_seconds")
_WEIGHT_KEY: Final = "load_weight"
_EXTRA_KEY: Final = "kv_connector_extra_config"
_EXAMPLE: Final = '"connectors": [{"kv_connector": "HybridOffloadConnector", "kv_connector_extra_config": {...}}, ...]'


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """One entry of `connectors`.

    Args:
        name: its class, with its position behind it where another child has the same; the label in metrics.
        connector: its registered name, or a class in its `kv_connector_module_path`.
        weight: what a token that it can load is worth.
        transfer: its KVTransferConfig as keywords. Not what the operator wrote but a copy, without `load_weight`.
    """

    name: str
    connector: str
    weight: Weight
    transfer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MultiConfig:
    """Children in the order of configuration, and how long a request waits for one that needs more time."""

    children: tuple[ChildConfig, ...]
    lookup_timeout_s: float


def decode_multi_config(
    raw: Mapping[str, Any], inherited: Mapping[str, Any], transfer_keys: Iterable[str]
) -> MultiConfig:
    """Decodes `kv_connector_extra_config` of HybridMultiConnector.

    Args:
        raw: what the operator wrote; it stays as it is.
        inherited: keys of KVTransferConfig that a child takes from the whole where it does not say otherwise.
        transfer_keys: all keys of KVTransferConfig.

    Raises:
        ConfigurationError: a key or value is not understood, or cannot work.
    """
    for key in raw:
        if key not in _KEYS:
            raise ConfigurationError(f"{ROOT}.{key}", "a known key", "an unknown one", did_you_mean(key, list(_KEYS)))
    entries = raw.get("connectors")
    path = f"{ROOT}.connectors"
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        found = repr(entries) if "connectors" in raw else "nothing"
        raise ConfigurationError(path, "a list of at least one connector", found, f"for example {_EXAMPLE}")
    if len(entries) > MAX_CHILDREN:
        raise ConfigurationError(path, f"at most {MAX_CHILDREN} connectors", len(entries), "name fewer")
    known = list(transfer_keys)
    parts = [_child(f"{path}[{i}]", entry, inherited, known) for i, entry in enumerate(entries)]
    twice = Counter(connector for connector, _, _ in parts)
    children = tuple(
        ChildConfig(connector if twice[connector] == 1 else f"{connector}-{i}", connector, weight, transfer)
        for i, (connector, weight, transfer) in enumerate(parts)
    )
    return MultiConfig(children, _timeout_s(raw.get("lookup_timeout_seconds", DEFAULT_LOOKUP_TIMEOUT_S)))


def _child(
    path: str, entry: object, inherited: Mapping[str, Any], known: list[str]
) -> tuple[str, Weight, Mapping[str, Any]]:
    if not isinstance(entry, Mapping):
        raise ConfigurationError(path, "an object that names a connector", repr(entry), f"for example {_EXAMPLE}")
    for key in entry:
        if key not in known:
            hint = f'put it into "{_EXTRA_KEY}"' if key == _WEIGHT_KEY else did_you_mean(str(key), known)
            raise ConfigurationError(f"{path}.{key}", "a known key", "an unknown one", hint)
    connector = entry.get("kv_connector")
    if not isinstance(connector, str) or not connector:
        raise ConfigurationError(
            f"{path}.kv_connector", "the name of a connector", repr(connector), 'such as "HybridOffloadConnector"'
        )
    if connector in MULTI_CONNECTORS:
        raise ConfigurationError(
            f"{path}.kv_connector", "a store", f"another {connector}", "name its connectors here, side by side"
        )
    extra = entry.get(_EXTRA_KEY, {})
    if not isinstance(extra, Mapping):
        raise ConfigurationError(f"{path}.{_EXTRA_KEY}", "an object", repr(extra), "leave it out if it says nothing")
    policy = entry.get("kv_load_failure_policy")
    if policy is not None and policy != inherited.get("kv_load_failure_policy", policy):
        raise ConfigurationError(
            f"{path}.kv_load_failure_policy",
            "the policy of the whole",
            repr(policy),
            "say it beside HybridMultiConnector",
        )
    weight = _weight(f"{path}.{_EXTRA_KEY}.{_WEIGHT_KEY}", extra.get(_WEIGHT_KEY, DEFAULT_WEIGHT))
    transfer = {**inherited, **entry, _EXTRA_KEY: {key: value for key, value in extra.items() if key != _WEIGHT_KEY}}
    return connector, weight, transfer


def _weight(path: str, value: object) -> Weight:
    if not is_weight(value):
        raise ConfigurationError(
            path, 'a positive, finite number, or "auto"', repr(value), f"{DEFAULT_WEIGHT} is the default"
        )
    return value if isinstance(value, str) else float(value)  # type: ignore[return-value, arg-type]


def _timeout_s(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigurationError(
            f"{ROOT}.lookup_timeout_seconds",
            "a number of seconds, 0 or more",
            repr(value),
            f"{DEFAULT_LOOKUP_TIMEOUT_S} is the default; 0 waits for no child",
        )
    return float(value)
