"""What each half of the connector registers at its server: a member of one cache, under one chunk and no other."""

from __future__ import annotations

from hybridkv.connectors.vllm.lmcache.site import Site
from hybridkv.lmcache.detection import ServerFacts
from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.member import CacheMember
from hybridkv.lmcache.wire import Registration


class SiteMember(CacheMember):
    """One process.

    Args:
        site: of the server.
        namespace: digest of whose content is kept.
        num_chunks: of the pool; 0 for a process that only looks.
    """

    def __init__(self, site: Site, namespace: bytes, num_chunks: int) -> None:
        super().__init__(site.groups, namespace, site.world_size, num_chunks)
        self._chunk_tokens = site.chunk_tokens

    def joining(self, facts: ServerFacts, chunk_tokens: int) -> Registration | None:
        if chunk_tokens != self._chunk_tokens:
            # Plans are made for one chunk, also where the engine began without the server.
            raise LMCacheConfigurationError(
                "chunk_size",
                f"{self._chunk_tokens} tokens, as this engine has been started with",
                chunk_tokens,
                f"start the server with --chunk-size {self._chunk_tokens}, or the engine anew",
            )
        return super().joining(facts, chunk_tokens)
