"""What a process registers at a server: a rank its pool, one that only looks nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hybridkv.lmcache.detection import ServerFacts
from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.geometry import Geometry, PageGroup, chunk_alignment, demand_server
from hybridkv.lmcache.keys import cache_name
from hybridkv.lmcache.pool import Pool
from hybridkv.lmcache.wire import Registration

logger = logging.getLogger(__name__)


class LMCacheSession:
    """A `Member`, of one cache.

    Args:
        groups: that are stored.
        fingerprint: of the content.
        world_size: ranks that each have a part.
        num_chunks: of the pool; 0 for a process that only looks.
        chunk_tokens: the only chunk that will do; None: that of the first server.
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
        """Since the first server that could be used; `AttributeError` before."""
        if self._geometry is None:
            raise AttributeError("no server has said its chunk yet")
        return self._geometry

    @property
    def pool(self) -> Pool:
        """The same."""
        if self._pool is None:
            raise AttributeError("no server has said its chunk yet, or this process only looks")
        return self._pool

    @property
    def model(self) -> str:
        """The name of the cache."""
        return cache_name(self._fingerprint, self.geometry.digest())

    @property
    def alignment_tokens(self) -> int:
        return chunk_alignment(self._groups)

    def joining(self, facts: ServerFacts, chunk_tokens: int) -> Registration | None:
        if self._chunk_tokens not in (None, chunk_tokens):
            # Pages lie in memory, and plans are made, for one chunk.
            raise LMCacheConfigurationError(
                "chunk_size",
                f"{self._chunk_tokens} tokens, as this engine has begun with",
                chunk_tokens,
                f"start the server with --chunk-size {self._chunk_tokens}, or the engine anew",
            )
        geometry = Geometry(self._groups, chunk_tokens)
        demand_server(geometry, facts)
        self._chunk_tokens = chunk_tokens
        if not self._num_chunks:
            self._geometry = geometry
            return None
        if self._pool is None:
            self._pool = Pool(geometry, self._num_chunks)
        elif self._pool.num_taken:
            # Somebody whom no answer reaches any more may still write there.
            logger.info("the pool is made anew: %d pages were under way", self._pool.num_taken)
            self._pool.renew()
        self._geometry = geometry
        return Registration(self._pool.instance, self.model, self._world_size, self._pool.wire_groups())

    def close(self) -> None:
        """Give up the pool. Close the connection first."""
        if self._pool is not None:
            self._pool.close()
