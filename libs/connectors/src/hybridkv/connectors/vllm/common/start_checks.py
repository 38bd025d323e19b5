"""Checks of the engine and of the configuration, before a connector does anything else."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from hybridkv.connectors.checking import check, raise_first
from hybridkv.connectors.config import ROOT
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.prefill_stops import current_child

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hybridkv")


def check_start(vllm_config: VllmConfig, role: KVConnectorRole) -> None:
    """Refuses an engine or a configuration that cannot work, and warns of probable mistakes in valid settings. Also
    sends the log of hybridkv's libraries to vLLM's handlers.

    Only the scheduler's half warns. For children of HybridMultiConnector, only their parent warns.

    Raises:
        ConfigurationError: the engine or the configuration cannot work.
    """
    compat.require_supported_engine()
    compat.share_log()
    transfer: Any = vllm_config.kv_transfer_config
    raw = {
        "kv_connector": transfer.kv_connector,
        "kv_role": transfer.kv_role,
        "kv_load_failure_policy": transfer.kv_load_failure_policy,
        ROOT: transfer.kv_connector_extra_config,
    }
    problems = check(raw, compat.transfer_keys()).problems
    raise_first(problems)
    if role == KVConnectorRole.SCHEDULER and current_child().admission is None:
        for problem in problems:
            logger.warning("%s: %s", transfer.kv_connector, problem.text())
