"""HybridMultiConnector as vLLM builds it, over children that the tests name. The configurations are real vLLM ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import stores
from stores import RecordingConnector
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR
from oracle.mixes import GPT_OSS, Mix
from oracle.settings import Configs, Connector, EngineSettings, make_configs

REQUEST = SimpleNamespace(request_id="r", num_tokens=100)


def entry(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": stores.MODULE, "kv_connector_extra_config": extra}


def offload(**extra: Any) -> dict[str, Any]:
    tiers = [{"type": "ram", "capacity": "16MiB"}]
    return {"kv_connector": CONNECTOR, "kv_connector_extra_config": {"tiers": tiers, **extra}}


def configure(*children: dict[str, Any], mix: Mix = GPT_OSS, **more: Any) -> Configs:
    extra = {"connectors": list(children), **more}
    return make_configs(mix, EngineSettings(num_blocks=64, connector=Connector(MULTI_CONNECTOR, extra)))


def build(configs: Configs, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    kv_cache = configs.scheduler if role is KVConnectorRole.SCHEDULER else configs.worker
    with set_current_vllm_config(configs.vllm):
        return KVConnectorFactory.create_connector(configs.vllm, role, kv_cache)


def recording(role: KVConnectorRole, count: int = 2) -> tuple[Any, list[RecordingConnector]]:
    connector = build(configure(*(entry("RecordingConnector") for _ in range(count))), role)
    for child in connector.sub_connectors:
        child.calls.clear()
    return connector, connector.sub_connectors
