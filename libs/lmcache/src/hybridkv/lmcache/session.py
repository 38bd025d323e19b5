"""Registration of a process at a server. A rank registers its pool. A lookup-only process registers nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hybridkv.lmcache.detection import ServerFacts
from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.geometry import Geometry, PageGroup, chunk_alignment, require_compatible_server
from hybridkv.lmcache.keys import cache_name
from hybridkv.lmcache.pool import Pool
from hybridkv.lmcache.wire import Registration

logger = logging.getLogger(__name__)


class LMCacheSession:
    """`ServerSession` of one cache.

    Args:
        groups: stored groups.
        fingerprint: fingerprint of the content.
        world_size: number of ranks; each rank stores its own part.
        num_chunks: size of the pool in chunks; 0 for a lookup-only process.
        chunk_tokens: required chunk size; None accepts the chunk size of the first server.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        fingerprint: bytes,
        world_size: int,
        num_chunks: int,
        chunk_tokens: int | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._fingerprint = fingerprint
        self._world_size = world_size
        self._num_chunks = num_chunks
        self._chunk_tokens = chunk_tokens
        self._geometry: Geometry | None = None
        self._pool: Pool | None = None

    @property
    def geometry(self) -> Geometry:
        """Geometry, set by the first usable server. Raises `AttributeError` before."""
        if self._geometry is None:
            raise AttributeError("no usable server yet")
        return self._geometry

    @property
    def pool(self) -> Pool:
        """Pool, set by the first usable server. Raises `AttributeError` before, and always in a lookup-only process."""
        if self._pool is None:
            raise AttributeError("no usable server yet, or this process is lookup-only")
        return self._pool

    @property
    def model(self) -> str:
        """Name of the cache."""
        return cache_name(self._fingerprint, self.geometry.digest())

    @property
    def alignment_tokens(self) -> int:
        return chunk_alignment(self._groups)

    def registration_for(self, facts: ServerFacts, chunk_tokens: int) -> Registration | None:
        """See `ServerSession`. For the first server, creates the pool. For a later server, recreates the pool if pages
        are taken: these pages become void."""
        if self._chunk_tokens not in (None, chunk_tokens):
            # Memory and plans are laid out for one chunk size.
            raise LMCacheConfigurationError(
                "chunk_size",
                f"{self._chunk_tokens} tokens, the chunk size that this engine started with",
                chunk_tokens,
                f"start the server with --chunk-size {self._chunk_tokens}, or restart the engine",
            )
        geometry = Geometry(self._groups, chunk_tokens)
        require_compatible_server(geometry, facts)
        self._chunk_tokens = chunk_tokens
        if not self._num_chunks:
            self._geometry = geometry
            return None
        if self._pool is None:
            self._pool = Pool(geometry, self._num_chunks)
        elif self._pool.num_taken:
            # The server of a lost connection may still write to the taken pages.
            logger.info("recreating the pool: %d pages were in flight", self._pool.num_taken)
            self._pool.recreate()
        self._geometry = geometry
        return Registration(self._pool.instance, self.model, self._world_size, self._pool.wire_groups())

    def close(self) -> None:
        """Frees the pool. Close the connection first."""
        if self._pool is not None:
            self._pool.close()
