"""What an operator says to HybridLMCacheConnector in `kv_connector_extra_config`: decoded strictly, nothing ignored."""

from __future__ import annotations

import msgspec


class LMCacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator says to HybridLMCacheConnector.

    Args:
        url: "tcp://HOST:PORT", where `lmcache server` listens: its --host and --port.
        http_port: where it answers over HTTP: its --http-port.
        pool: bytes of shared memory, over all ranks of the engine, through which pages come and go. A request restores
            no more than fits.
        chunk_tokens: the server's chunk. None: it is asked, so it must be there when the engine starts.
        connect_timeout_seconds: how long the start waits for the server.
        lookup_timeout_seconds: how long a request waits for the answer to what of it is stored.
        load_timeout_seconds: how long a request waits for its load before it is computed instead.
        store_timeout_seconds: how long a store waits for room in the pool, and then for its answer.
        heartbeat_seconds: between two looks at a server that lives.
        without_prefix_caching: prefix caching was switched off on purpose, and this model resumes prefixes.
        weights_digest: how weights are told apart, as for HybridOffloadConnector.
        identity_ignores: names of facts that the operator knows to change nothing in what is stored.
        experimental_cuda: whether engines on GPUs may use it.
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
    experimental_cuda: bool = False
