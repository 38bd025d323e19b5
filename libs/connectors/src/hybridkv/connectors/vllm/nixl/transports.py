"""Which transport moves the bytes: the operator's choice, or the fastest that is installed."""

from __future__ import annotations

import logging

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.nixl.config import NixlConfig
from hybridkv.peers.transport import Transport
from hybridkv.peers.wire import Secret

logger = logging.getLogger("vllm.hybridkv.nixl")
