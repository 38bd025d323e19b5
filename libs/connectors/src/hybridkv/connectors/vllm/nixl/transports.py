"""Which transport moves the bytes: the operator's choice, or the fastest that is installed."""

from __future__ import annotations

import logging

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.nixl.config import NixlConfig
from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport import Transport
from hybridkv.peers.transport.nixl_library import has_nixl
from hybridkv.peers.transport.tcp import TcpOptions, TcpTransport
from hybridkv.peers.wire import Secret

logger = logging.getLogger("vllm.hybridkv.nixl")


def open_transport(config: NixlConfig, secret: Secret, name: str) -> Transport:
    """The transport of one rank.

    Raises:
        ConfigurationError: it is not installed, or its address cannot be used.
    """
    if config.transport == "tcp":
        return _tcp(config, secret, name)
    if config.transport == "auto" and not has_nixl():
        logger.info("HybridNixlConnector: nixl is not installed, so bytes move over tcp")
        return _tcp(config, secret, name)
    # Not at the top: it is an extra, and brings libraries that a process without it should not load.
    from hybridkv.peers.transport.nixl import NixlTransport

    try:
        return NixlTransport(name)
    except PeersConfigurationError as error:
        hint = error.hint or 'use "tcp"'
        raise ConfigurationError(f"{ROOT}.transport", error.expected, error.got, hint) from None


def _tcp(config: NixlConfig, secret: Secret, name: str) -> Transport:
    listen = config.listen
    options = TcpOptions(
        host=listen.host, advertised_host=listen.advertise or "", connect_timeout_s=config.connect_timeout_seconds
    )
    try:
        return TcpTransport(name, secret, options)
    except PeersConfigurationError as error:
        raise ConfigurationError(f"{ROOT}.listen", error.expected, error.got, error.hint) from None
    except OSError as error:
        got = f"{listen.host}: {error.strerror or error}"
        raise ConfigurationError(f"{ROOT}.listen.host", "an address of this host", got, "127.0.0.1 is one") from None
