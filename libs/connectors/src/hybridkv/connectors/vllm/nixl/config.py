"""Configuration of HybridNixlConnector in `kv_connector_extra_config`. Unknown keys are errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.decoding import as_configuration_error, refuse_unknown_keys
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.hosts import AllowedHosts, default_hosts, is_wildcard
from hybridkv.connectors.vllm.nixl.params import MAX_RANKS

MAX_LEASES = 1 << 16
MAX_PORT = (1 << 16) - 1
_KEYS_IN_SECONDS = ("connect_timeout_seconds", "load_timeout_seconds", "lease_seconds")


class ListenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address at which the ranks of a producer listen for consumers.

    Args:
        host: address to listen on; the loopback by default.
        port: port of rank 0; rank n takes the n-th port after it. 0: any free port. Each request carries the ports.
        advertise: address that consumers use, if it differs from `host`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None

    @property
    def advertised(self) -> str:
        """Address that each request carries to consumers."""
        return self.advertise or self.host


class NixlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of HybridNixlConnector.

    Args:
        secret_file: file with the secret that both sides share. Without a secret, the connector listens on the loopback
            only and connects to the loopback only.
        listen: address for consumers.
        allowed_hosts: names, addresses and networks of producers that a request may name. None: the loopback, and the
            addresses of `listen`.
        verify: True to compare digests of both sides' pages after each read.
        lease_seconds: time that a producer holds blocks without a renewal by the consumer.
        max_leases: maximum leases at the same time, of running and of finished requests. Further requests are not
            handed over.
        connect_timeout_seconds: timeout of each of two steps: the peer proves the secret; the peer describes itself.
        load_timeout_seconds: maximum time of a load; a longer load fails.
        without_prefix_caching: True if the operator switched prefix caching off on purpose, and this model resumes
            prefixes.
        weights_digest: method to identify the weights, as for HybridOffloadConnector.
        identity_ignores: names of facts to ignore, because the operator knows that they do not change the KV cache.
    """

    secret_file: str | None = None
    listen: ListenConfig = ListenConfig()
    allowed_hosts: tuple[str, ...] | None = None
    verify: bool = True
    lease_seconds: float = 30.0
    max_leases: int = 1024
    connect_timeout_seconds: float = 5.0
    load_timeout_seconds: float = 30.0
    without_prefix_caching: bool = False
    weights_digest: str = "sampled"
    identity_ignores: tuple[str, ...] = ()

    @property
    def hosts(self) -> AllowedHosts:
        """Producers' hosts that a request may name. Raises `ValueError` if an entry is not a host."""
        if self.allowed_hosts is None:
            return AllowedHosts(default_hosts(self.listen.host, self.listen.advertise))
        return AllowedHosts(self.allowed_hosts)


_EXPECTED = {
    "secret_file": "the path of a file",
    "allowed_hosts": 'a list such as ["10.0.0.0/8", "prefill-1"]',
    "listen": 'an object such as {"host": "127.0.0.1", "port": 14579}',
}


def decode_config(raw: Mapping[str, Any]) -> NixlConfig:
    """Decodes `kv_connector_extra_config`.

    Raises:
        ConfigurationError: a key or a value is unknown, or a value cannot work.
    """
    refuse_unknown_keys(ROOT, raw, NixlConfig)
    if isinstance(raw.get("listen"), Mapping):
        refuse_unknown_keys(f"{ROOT}.listen", raw["listen"], ListenConfig)
    try:
        config = msgspec.convert(dict(raw), NixlConfig, strict=True)
    except msgspec.ValidationError as error:
        raise as_configuration_error(error, raw, ROOT, _EXPECTED, "docs/guides/peers.md") from None
    _require_valid(config)
    return config


def require_ports(listen: ListenConfig, num_ranks: int) -> None:
    """Checks that consumers can reach every rank.

    Raises:
        ConfigurationError: there are more ranks than a consumer accepts, or the last ranks' ports exceed 65535.
    """
    if num_ranks > MAX_RANKS:
        hint = f"a consumer connects to at most {MAX_RANKS} ranks for one request"
        raise ConfigurationError("tensor_parallel_size", f"at most {MAX_RANKS} ranks in a producer", num_ranks, hint)
    last = listen.port + num_ranks - 1
    if listen.port and last > MAX_PORT:
        expected = f"at most {MAX_PORT - num_ranks + 1}, because {num_ranks} ranks take one port each"
        got = f"{listen.port}, and {last} for the last rank"
        raise ConfigurationError(f"{ROOT}.listen.port", expected, got, "or 0 for any free ports")


def _require_valid(config: NixlConfig) -> None:
    for name in _KEYS_IN_SECONDS:
        if not 0 < getattr(config, name) < math.inf:
            hint = f"{getattr(NixlConfig(), name):g} is the default"
            raise ConfigurationError(f"{ROOT}.{name}", "seconds above 0", getattr(config, name), hint)
    if not 0 < config.max_leases <= MAX_LEASES:
        raise ConfigurationError(f"{ROOT}.max_leases", f"1 to {MAX_LEASES}", config.max_leases, "1024 is the default")
    if not 0 <= config.listen.port <= MAX_PORT:
        raise ConfigurationError(f"{ROOT}.listen.port", "a port, or 0", config.listen.port, "for example 14579")
    if not config.listen.host.strip():
        raise ConfigurationError(f"{ROOT}.listen.host", "an address", "nothing", '"127.0.0.1" for this machine only')
    _require_advertised(config.listen)
    try:
        _ = config.hosts
    except ValueError as error:
        raise ConfigurationError(
            f"{ROOT}.allowed_hosts", "names, addresses and networks", str(error), '["10.0.0.0/8", "prefill-1"]'
        ) from None
    if not config.weights_digest.strip():
        hint = "two sets of weights with an empty name would count as the same weights"
        raise ConfigurationError(
            f"{ROOT}.weights_digest", '"sampled", "full", or your own name for these weights', "nothing", hint
        )


def _require_advertised(listen: ListenConfig) -> None:
    """Checks the advertised address: a consumer refuses every prompt of a producer at 0.0.0.0."""
    if listen.advertise is not None and not listen.advertise.strip():
        hint = "leave it out if it equals listen.host"
        raise ConfigurationError(f"{ROOT}.listen.advertise", "an address or a name", "nothing", hint)
    if is_wildcard(listen.advertised):
        got = repr(listen.advertise) if listen.advertise else f"nothing, and {listen.host!r} for listen.host"
        hint = "name the address at which consumers reach this host; no consumer can connect to a wildcard address"
        raise ConfigurationError(f"{ROOT}.listen.advertise", "an address that consumers reach", got, hint)
