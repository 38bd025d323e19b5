"""Which transport moves the bytes: the operator's choice, or the fastest that is installed."""

from __future__ import annotations

import logging

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.nixl.config import NixlConfig
from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport import Transport
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
    try:
        return _nixl(name)
    except ImportError as error:
        if config.transport == "nixl":
            raise ConfigurationError(
                f"{ROOT}.transport", "nixl to be installed", str(error), 'pip install nixl, or use "tcp"'
            ) from None
        logger.info("HybridNixlConnector: nixl is not installed (%s), so bytes move over tcp", error)
        return _tcp(config, secret, name)


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


def _nixl(name: str) -> Transport:
    from hybridkv.peers.transport.nixl import open_nixl

    return open_nixl(name)
