"""Children of HybridMultiConnector: their classes and configurations, and checks that they can work together."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, supports_hma

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError, ManagerError, did_you_mean
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.prefill_stops import ChildPlace, PrefillStops, as_child
from hybridkv.connectors.vllm.multi.config import ChildConfig, MultiConfig, decode_multi_config
from hybridkv.planner import LoadAdmission

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_INHERITED = ("engine_id", "kv_role", "kv_load_failure_policy")
_NEEDS_VLLM_MULTI_CONNECTOR = ("HiSparseConnector",)
"""Connectors that need set-up by vLLM. vLLM finds their names only as children of its own MultiConnector."""


@dataclass(frozen=True, slots=True)
class ChildClass:
    """Child before it is built. `vllm_config` is the engine's configuration with the child's KVTransferConfig."""

    config: ChildConfig
    connector_class: Any
    vllm_config: VllmConfig


@dataclass(frozen=True, slots=True)
class Child:
    """Child in this process."""

    config: ChildConfig
    connector: KVConnectorBase_V1
    supports_groups: bool

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def stores_only(self) -> bool:
        """Whether the child declares that it never loads. `kv_role` has another meaning in each connector."""
        return bool(getattr(self.connector, "stores_only", False))

    @property
    def has_bounded_lookups(self) -> bool:
        """Whether the child declares that its lookups take bounded time, so that a request may wait for them."""
        return bool(getattr(self.connector, "has_bounded_lookups", False))

    def plan_without_lookup(self, request: Request, computed_tokens: int) -> None:
        """Plans the prefill stops of a request without an answer of this child. Does nothing if the connector has no
        such method.

        Args:
            request: the request.
            computed_tokens: tokens that the engine holds.
        """
        plan = getattr(self.connector, "plan_without_lookup", None)
        if plan is not None:
            plan(request, computed_tokens)


def class_of(config: ChildConfig, transfer: KVTransferConfig) -> Any:
    """Class of a child.

    Raises:
        ConfigurationError: no connector with this name is registered.
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
    """Decodes the configuration and finds the children's classes. Does not change the engine's configuration.

    Raises:
        ConfigurationError: the configuration is wrong, or a child cannot work here.
    """
    outer = vllm_config.kv_transfer_config
    inherited = {key: getattr(outer, key) for key in _INHERITED if getattr(outer, key, None) is not None}
    config = decode_multi_config(outer.kv_connector_extra_config, inherited, compat.transfer_keys())
    classes = []
    for child in config.children:
        if child.connector in _NEEDS_VLLM_MULTI_CONNECTOR:
            raise ConfigurationError(
                f"{ROOT}.connectors ({child.name})",
                "a connector that needs no set-up by vLLM",
                child.connector,
                "vLLM sets it up only under its own MultiConnector; use that one",
            )
        own = copy.copy(vllm_config)
        own.kv_transfer_config = KVTransferConfig(**child.transfer)
        classes.append(ChildClass(child, class_of(child, own.kv_transfer_config), own))
    return config, tuple(classes)


def resolve_without_engine(extra_config: Mapping[str, Any]) -> list[tuple[Any, KVTransferConfig]]:
    """The children's classes and KVTransferConfigs, from `kv_connector_extra_config` alone.

    Raises:
        ConfigurationError: the configuration is wrong.
    """
    config = decode_multi_config(extra_config, {"kv_role": "kv_both"}, compat.transfer_keys())
    transfers = [KVTransferConfig(**child.transfer) for child in config.children]
    return [(class_of(child, own), own) for child, own in zip(config.children, transfers, strict=True)]


def require_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, classes: Sequence[ChildClass]) -> None:
    """Refuses children that support only one KV cache group if the model has, or may have, several.

    Raises:
        ManagerError: there is such a child. The text names these children and the remedies.
    """
    is_on = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    num_groups = len(kv_cache_config.kv_cache_groups)
    if not is_on and num_groups <= 1:
        return
    without = [child.config.name for child in classes if not supports_hma(child.connector_class)]
    if without:
        state = "on" if is_on else f"off and the model has {num_groups} groups"
        names = ", ".join(without)
        hint = f"remove {names} from connectors"
        if is_on:
            hint += ", or start with --disable-hybrid-kv-cache-manager (models with recurrent layers need that manager)"
        raise ManagerError(
            f"{ROOT}.connectors",
            f"children that support several KV cache groups (SupportsHMA): the hybrid KV cache manager is {state}",
            names,
            hint,
        )


def build_children(
    classes: Sequence[ChildClass],
    role: KVConnectorRole,
    kv_cache_config: KVCacheConfig,
    admission: LoadAdmission,
    prefill_stops: PrefillStops | None,
) -> tuple[Child, ...]:
    """Builds the children of one role. They share `admission` and `prefill_stops`. If a child cannot start,
    shuts down the children that were built before."""
    children: list[Child] = []
    try:
        for number, child in enumerate(classes):
            with as_child(ChildPlace(number, admission, prefill_stops)):
                connector = child.connector_class(child.vllm_config, role, kv_cache_config)
            children.append(Child(child.config, connector, supports_hma(connector)))
    except BaseException:
        for built in children:
            built.connector.shutdown()
        raise
    return tuple(children)
