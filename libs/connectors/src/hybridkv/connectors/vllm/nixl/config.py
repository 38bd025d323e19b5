"""What an operator says to HybridNixlConnector in `kv_connector_extra_config`: decoded strictly, nothing ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.decoding import as_configuration_error, refuse_unknown_keys
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.nixl.hosts import AllowedHosts, default_hosts, is_any
from hybridkv.connectors.vllm.nixl.params import MAX_RANKS

MAX_LEASES = 1 << 16
MAX_PORT = (1 << 16) - 1
_SECONDS = ("connect_timeout_seconds", "load_timeout_seconds", "lease_seconds")


class ListenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the ranks of a producer are asked.

    Args:
        host: the address that they listen on; the loopback unless it is said otherwise.
        port: of rank 0; the others follow. 0: any port that is free, which every request is told.
        advertise: the address that consumers are told, where it is another one than `host`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None

    @property
    def advertised(self) -> str:
        """The address that consumers are told."""
        return self.advertise or self.host


class NixlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator says to HybridNixlConnector.

    Args:
        secret_file: holds what both sides must know before one tells the other anything. Without one only the loopback
            is listened on and connected to.
        listen: where consumers ask.
        allowed_hosts: names, addresses and networks of producers that a request may name. None: the loopback, and the
            addresses of `listen`.
        verify: compare digests of both sides' pages after each read.
        lease_seconds: how long blocks are held for a consumer that says nothing.
        max_leases: requests whose blocks are held at the same time; one more is not handed over.
        connect_timeout_seconds: how long a peer has to answer.
        load_timeout_seconds: how long a request waits for its load before it is computed instead.
        without_prefix_caching: prefix caching was switched off on purpose, and this model resumes prefixes.
        weights_digest: how weights are told apart, as for HybridOffloadConnector.
        identity_ignores: names of facts that the operator knows to change nothing in what is handed over.
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
        """The producers' hosts to which a request may lead. ValueError: an entry is none."""
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
        ConfigurationError: a key or value is not understood, or a value cannot work.
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
    """Consumers can find every rank: there are not too many, and each has a port of its own, if rank 0 was given one.

    Raises:
        ConfigurationError: no consumer would take so many, or the ports of the last ones would be none.
    """
    if num_ranks > MAX_RANKS:
        hint = "a consumer connects to no more for one request"
        raise ConfigurationError("tensor_parallel_size", f"at most {MAX_RANKS} ranks that hand over", num_ranks, hint)
    last = listen.port + num_ranks - 1
    if listen.port and last > MAX_PORT:
        expected = f"at most {MAX_PORT - num_ranks + 1}, since each of {num_ranks} ranks takes the next port"
        got = f"{listen.port}, and {last} for the last rank"
        raise ConfigurationError(f"{ROOT}.listen.port", expected, got, "or 0, for any that are free")


def _require_valid(config: NixlConfig) -> None:
    for name in _SECONDS:
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigurationError(f"{ROOT}.{name}", "seconds above 0", getattr(config, name), "30 is usual")
    if not 0 < config.max_leases <= MAX_LEASES:
        raise ConfigurationError(f"{ROOT}.max_leases", f"1 to {MAX_LEASES}", config.max_leases, "1024 is usual")
    if not 0 <= config.listen.port <= MAX_PORT:
        raise ConfigurationError(f"{ROOT}.listen.port", "a port, or 0", config.listen.port, "14579 is as good as any")
    if not config.listen.host.strip():
        raise ConfigurationError(f"{ROOT}.listen.host", "an address", "nothing", '"127.0.0.1" for this machine alone')
    _require_advertised(config.listen)
    try:
        _ = config.hosts
    except ValueError as error:
        raise ConfigurationError(
            f"{ROOT}.allowed_hosts", "names, addresses and networks", str(error), '["10.0.0.0/8", "prefill-1"]'
        ) from None
    if not config.weights_digest.strip():
        hint = "two models of one name would be taken for each other"
        raise ConfigurationError(
            f"{ROOT}.weights_digest", '"sampled", "full", or your own name for these weights', "nothing", hint
        )


def _require_advertised(listen: ListenConfig) -> None:
    """A consumer that is told 0.0.0.0 refuses every prompt."""
    if listen.advertise is not None and not listen.advertise.strip():
        hint = "leave it out where it is listen.host"
        raise ConfigurationError(f"{ROOT}.listen.advertise", "an address or a name", "nothing", hint)
    if is_any(listen.advertised):
        got = repr(listen.advertise) if listen.advertise else f"nothing, and {listen.host!r} for listen.host"
        hint = "name this host as its consumers know it: an address that stands for all is no place to go to"
        raise ConfigurationError(f"{ROOT}.listen.advertise", "an address that consumers reach", got, hint)
