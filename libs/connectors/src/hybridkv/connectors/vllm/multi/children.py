"""The children of HybridMultiConnector: which classes, with which configuration, and whether they can work together."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, supports_hma

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError, ManagerError, did_you_mean
from hybridkv.connectors.vllm.steering import Sibling, Steering, as_sibling
from hybridkv.metrics import MAX_CHILDREN
from hybridkv.planner import LoadAdmission, Weight, is_weight

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

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


_INHERITED = ("engine_id", "kv_role", "kv_load_failure_policy")
_PREPARED_BY_NAME = ("HiSparseConnector",)
"""What vLLM sets itself up for when it reads this name, which it looks for below its own MultiConnector alone."""


@dataclass(frozen=True, slots=True)
class ChildClass:
    """A child before it is built: `vllm_config` is the engine's, with the child's own KVTransferConfig."""

    config: ChildConfig
    connector_class: Any
    vllm_config: VllmConfig


@dataclass(frozen=True, slots=True)
class Child:
    """A child of this process."""

    config: ChildConfig
    connector: KVConnectorBase_V1
    supports_groups: bool

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def stores_only(self) -> bool:
        """Whether it says of itself that it never loads. What `kv_role` means to other connectors is theirs to know."""
        return bool(getattr(self.connector, "stores_only", False))

    @property
    def answers_soon(self) -> bool:
        """Whether it says of itself that it bounds the time of an answer, so that others may wait for it."""
        return bool(getattr(self.connector, "answers_soon", False))


def transfer_keys() -> list[str]:
    """The keys of vLLM's KVTransferConfig."""
    return [field.name for field in dataclasses.fields(KVTransferConfig)]  # type: ignore[arg-type]


def class_of(config: ChildConfig, transfer: KVTransferConfig) -> Any:
    """A child's class.

    Raises:
        ConfigurationError: no connector of that name is registered.
    """
    if not transfer.kv_connector_module_path and config.connector not in KVConnectorFactory._registry:
        raise ConfigurationError(
            f"{ROOT}.connectors ({config.name})",
            "a registered connector",
            repr(config.connector),
            did_you_mean(config.connector, list(KVConnectorFactory._registry)),
        )
    return KVConnectorFactory.get_connector_class(transfer)


def resolve_children(vllm_config: VllmConfig) -> tuple[MultiConfig, tuple[ChildClass, ...]]:
    """Reads the configuration and finds the children's classes. The engine's configuration stays as it is.

    Raises:
        ConfigurationError: it is not understood, or a child cannot work here.
    """
    outer = vllm_config.kv_transfer_config
    inherited = {key: getattr(outer, key) for key in _INHERITED if getattr(outer, key, None) is not None}
    config = decode_multi_config(outer.kv_connector_extra_config, inherited, transfer_keys())
    classes = []
    for child in config.children:
        if child.connector in _PREPARED_BY_NAME:
            raise ConfigurationError(
                f"{ROOT}.connectors ({child.name})",
                "a connector that vLLM need not know of beforehand",
                child.connector,
                "vLLM sets itself up for it only below its own MultiConnector; use that one",
            )
        own = copy.copy(vllm_config)
        own.kv_transfer_config = KVTransferConfig(**child.transfer)
        classes.append(ChildClass(child, class_of(child, own.kv_transfer_config), own))
    return config, tuple(classes)


def resolve_without_engine(extra_config: Mapping[str, Any]) -> list[tuple[Any, KVTransferConfig]]:
    """The children's classes and own configurations where nothing but `kv_connector_extra_config` is known.

    Raises:
        ConfigurationError: it is not understood.
    """
    config = decode_multi_config(extra_config, {"kv_role": "kv_both"}, transfer_keys())
    transfers = [KVTransferConfig(**child.transfer) for child in config.children]
    return [(class_of(child, own), own) for child, own in zip(config.children, transfers, strict=True)]


def require_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, classes: Sequence[ChildClass]) -> None:
    """Refuses children that know of one KV cache group only, where there are or may be several.

    Raises:
        ManagerError: names them, and both ways out.
    """
    is_on = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    num_groups = len(kv_cache_config.kv_cache_groups)
    if not is_on and num_groups <= 1:
        return
    without = [child.config.name for child in classes if not supports_hma(child.connector_class)]
    if without:
        state = "on" if is_on else f"off and the model has {num_groups} groups"
        names = ", ".join(without)
        raise ManagerError(
            f"{ROOT}.connectors",
            f"children that support several KV cache groups (SupportsHMA): the hybrid KV cache manager is {state}",
            names,
            f"remove {names} from connectors, or start with --disable-hybrid-kv-cache-manager (models with recurrent "
            "layers need that manager)",
        )


def build_children(
    classes: Sequence[ChildClass],
    role: KVConnectorRole,
    kv_cache_config: KVCacheConfig,
    admission: LoadAdmission,
    steering: Steering | None,
) -> tuple[Child, ...]:
    """Builds the children of one role, who share `admission` and `steering`. When one cannot start, those before it are
    shut down."""
    children: list[Child] = []
    try:
        for number, child in enumerate(classes):
            with as_sibling(Sibling(number, admission, steering)):
                connector = child.connector_class(child.vllm_config, role, kv_cache_config)
            children.append(Child(child.config, connector, supports_hma(connector)))
    except BaseException:
        for built in children:
            built.connector.shutdown()
        raise
    return tuple(children)
