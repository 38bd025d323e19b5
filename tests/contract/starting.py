"""Starts connectors as an engine does: both roles through vLLM's factory, or the error that both raise."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from hybridkv.connectors.errors import ConfigurationError
from oracle.settings import Configs


def start(configs: Configs, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    kv_cache = configs.scheduler if role is KVConnectorRole.SCHEDULER else configs.worker
    with set_current_vllm_config(configs.vllm):
        return KVConnectorFactory.create_connector(configs.vllm, role, kv_cache)


def refusal_of(configs: Configs) -> ConfigurationError:
    """The error with which both roles refuse to start."""
    errors = []
    for role in KVConnectorRole:
        with pytest.raises(ConfigurationError) as caught:
            start(configs, role)
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    assert all(part and str(part) in str(errors[0]) for part in (errors[0].path, errors[0].expected, errors[0].hint))
    return errors[0]
