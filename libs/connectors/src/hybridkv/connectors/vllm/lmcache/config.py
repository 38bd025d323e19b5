"""Configuration of HybridLMCacheConnector: strict decoding of `kv_connector_extra_config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from hybridkv.connectors.config import ROOT, parse_address, parse_size
from hybridkv.connectors.decoding import as_configuration_error, refuse_unknown_keys
from hybridkv.connectors.errors import ConfigurationError

_KEYS_IN_SECONDS = (
    "connect_timeout_seconds",
    "lookup_timeout_seconds",
    "load_timeout_seconds",
    "store_timeout_seconds",
    "heartbeat_seconds",
)
_CHOICES = {
    "chunk_tokens": "a number of tokens, or null",
    "copies": '"engine" or "native"',
    "on_reset": '"clear" or "keep"',
    "identity_ignores": "a list of names of facts",
    "weights_digest": '"sampled", "full", or your own name for these weights',
}
_PAGE = "docs/guides/lmcache.md"


class LMCacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of HybridLMCacheConnector.

    Args:
        url: "tcp://HOST:PORT" of `lmcache server`: its --host and --port.
        http_port: HTTP port of the server: its --http-port.
        pool: bytes of shared memory for pages in transit, over all ranks of the engine. A request restores no more
            than fits into it.
        chunk_tokens: the server's chunk size. None: read from the server, which must then run when the engine starts.
        connect_timeout_seconds: timeout of the first connection.
        lookup_timeout_seconds: timeout of a lookup.
        load_timeout_seconds: timeout of a load; then the load fails, and `kv_load_failure_policy` decides about the
            request.
        store_timeout_seconds: timeout for free pages, and again for the answer of the server.
        heartbeat_seconds: interval between two heartbeats.
        without_prefix_caching: prefix caching was switched off on purpose, and this model can resume prefixes.
        weights_digest: identification of the weights, as for HybridOffloadConnector.
        identity_ignores: names of facts that do not change the stored bytes.
        copies: copy engine on a GPU, as for HybridOffloadConnector.
        on_reset: effect of a reset of vLLM's caches, as for HybridOffloadConnector.
    """

    url: str
    http_port: int = 8080
    pool: int = 1 << 30
    chunk_tokens: int | None = None
    connect_timeout_seconds: float = 10.0
    lookup_timeout_seconds: float = 2.0
    load_timeout_seconds: float = 30.0
    store_timeout_seconds: float = 10.0
    heartbeat_seconds: float = 2.0
    without_prefix_caching: bool = False
    weights_digest: str = "sampled"
    identity_ignores: tuple[str, ...] = ()
    copies: Literal["engine", "native"] = "engine"
    on_reset: Literal["clear", "keep"] = "clear"


def decode_config(raw: Mapping[str, Any]) -> LMCacheConfig:
    """Decodes `kv_connector_extra_config`.

    Raises:
        ConfigurationError: unknown key, or invalid value.
    """
    refuse_unknown_keys(ROOT, raw, LMCacheConfig)
    plain = dict(raw)
    if "pool" in plain:
        plain["pool"] = parse_size(f"{ROOT}.pool", plain["pool"])
    try:
        config = msgspec.convert(plain, LMCacheConfig, strict=True)
    except msgspec.ValidationError as error:
        raise as_configuration_error(error, raw, ROOT, _CHOICES, _PAGE) from None
    _check_address(config.url, config.http_port)
    for name in _KEYS_IN_SECONDS:
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigurationError(f"{ROOT}.{name}", "seconds above 0", getattr(config, name), f"see {_PAGE}")
    if config.chunk_tokens is not None and config.chunk_tokens <= 0:
        raise ConfigurationError(
            f"{ROOT}.chunk_tokens", "a positive number of tokens", config.chunk_tokens, "the server's --chunk-size"
        )
    if not config.weights_digest.strip():
        raise ConfigurationError(
            f"{ROOT}.weights_digest",
            _CHOICES["weights_digest"],
            "nothing",
            "two sets of weights with an empty name would share a cache",
        )
    return config


def _check_address(url: str, http_port: int) -> None:
    if parse_url(url) is None:
        raise ConfigurationError(
            f"{ROOT}.url",
            "tcp://HOST:PORT, with a port from 1 to 65535",
            repr(url),
            'the --host and --port of `lmcache server`, for example "tcp://127.0.0.1:5555"; its HTTP side is http_port',
        )
    if not 0 < http_port < 1 << 16:
        raise ConfigurationError(
            f"{ROOT}.http_port", "a port from 1 to 65535", http_port, "the --http-port of `lmcache server`"
        )


def parse_url(text: str) -> tuple[str, int] | None:
    """Host and port of "tcp://HOST:PORT". None for any other text."""
    scheme, mark, address = text.strip().partition("://")
    return parse_address(address) if mark and scheme == "tcp" and "/" not in address else None
