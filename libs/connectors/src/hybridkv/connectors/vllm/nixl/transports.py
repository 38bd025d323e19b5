"""NIXL transport of one rank."""

from __future__ import annotations

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport import Transport


def open_transport(name: str) -> Transport:
    """The transport of one rank.

    Raises:
        ConfigurationError: NIXL is not installed.
    """
    # Not at the top: it brings libraries that a process without this connector should not load.
    from hybridkv.peers.transport.nixl import NixlTransport

    try:
        return NixlTransport(name)
    except PeersConfigurationError as error:
        raise ConfigurationError("kv_connector", error.expected, error.got, error.hint) from None
