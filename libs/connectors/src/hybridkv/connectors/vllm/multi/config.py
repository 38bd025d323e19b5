"""Configuration of HybridMultiConnector. Unknown keys are errors. Children decode their own configuration.

Does not import vLLM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError, did_you_mean
from hybridkv.connectors.vllm import PEER_CONNECTOR
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
    """Entry of `connectors`.

    Args:
        name: label in metrics: class name, followed by the position if several children have this class.
        connector: registered name, or name of a class in the module `kv_connector_module_path`.
        weight: weight of a token that the child can load.
        transfer: keywords of the child's KVTransferConfig: inherited keys and the entry, without `load_weight`.
    """

    name: str
    connector: str
    weight: Weight
    transfer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MultiConfig:
    """Children in the order of the configuration, and the timeout of a wait for their lookups."""

    children: tuple[ChildConfig, ...]
    lookup_timeout_s: float


def decode_multi_config(
    raw: Mapping[str, Any], inherited: Mapping[str, Any], transfer_keys: Iterable[str]
) -> MultiConfig:
    """Decodes `kv_connector_extra_config` of HybridMultiConnector.

    Args:
        raw: the configuration; not changed.
        inherited: keys of the outer KVTransferConfig that a child takes over if its entry does not set them.
        transfer_keys: all keys of KVTransferConfig.

    Raises:
        ConfigurationError: a key or a value is unknown, or a value cannot work.
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
    _require_one_producer(path, parts)
    twice = Counter(connector for connector, _, _ in parts)
    children = tuple(
        ChildConfig(connector if twice[connector] == 1 else f"{connector}-{i}", connector, weight, transfer)
        for i, (connector, weight, transfer) in enumerate(parts)
    )
    return MultiConfig(children, _timeout_s(raw.get("lookup_timeout_seconds", DEFAULT_LOOKUP_TIMEOUT_S)))


def _require_one_producer(path: str, parts: Sequence[tuple[str, Weight, Mapping[str, Any]]]) -> None:
    """Refuses several children that hand over prompts: a request can carry the parameters of one child only."""
    producers = [
        f"connectors[{i}]"
        for i, (connector, _, transfer) in enumerate(parts)
        if connector == PEER_CONNECTOR and transfer.get("kv_role") != "kv_consumer"
    ]
    if len(producers) > 1:
        hint = 'remove the others, or set their kv_role to "kv_consumer"'
        raise ConfigurationError(path, f"one {PEER_CONNECTOR} that hands over", " and ".join(producers), hint)


def _child(
    path: str, entry: object, inherited: Mapping[str, Any], known: list[str]
) -> tuple[str, Weight, Mapping[str, Any]]:
    if not isinstance(entry, Mapping):
        raise ConfigurationError(path, "an object with kv_connector", repr(entry), f"for example {_EXAMPLE}")
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
            f"{path}.kv_connector", "a connector other than a multi connector", connector, "list its connectors here"
        )
    extra = entry.get(_EXTRA_KEY, {})
    if not isinstance(extra, Mapping):
        raise ConfigurationError(f"{path}.{_EXTRA_KEY}", "an object", repr(extra), "leave it out if it is empty")
    policy = entry.get("kv_load_failure_policy")
    if policy is not None and policy != inherited.get("kv_load_failure_policy", policy):
        raise ConfigurationError(
            f"{path}.kv_load_failure_policy",
            "the policy of HybridMultiConnector",
            repr(policy),
            "set it beside HybridMultiConnector, not in a child",
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
            f"{DEFAULT_LOOKUP_TIMEOUT_S} is the default; 0 means: never wait",
        )
    return float(value)
