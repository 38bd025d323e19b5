"""Messages from the scheduler to the workers. Results come back as `StepOutcome`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy of blocks of one group in one chunk. Each block is one page.

    Args:
        group_index: engine's index of the group.
        chunk: index of the chunk in the prefix, from 0.
        first_block: index of the first of `block_ids` among the group's blocks in the chunk.
        block_ids: engine's blocks, in token order.
    """

    group_index: int
    chunk: int
    first_block: int
    block_ids: tuple[int, ...]


class PageLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load of one request.

    Args:
        request_id: vLLM's id of the request.
        digests: digest of each chunk of the resumed prefix, from chunk 0.
        start_chunk: first chunk to retrieve.
        copies: blocks to write.
        refused: set if the load must fail without a copy, with the reason.
    """

    request_id: str
    digests: tuple[bytes, ...]
    start_chunk: int
    copies: tuple[PageCopy, ...]
    refused: str | None = None


class PageStore(msgspec.Struct, frozen=True, array_like=True):
    """Store of one request after a step: chunks from `start_chunk` to the end of `digests`.

    A group without a copy in a chunk has no bytes for it: a freed window, or a boundary without a state.

    Args:
        store_id: number of the store.
        digests: digest of each chunk of the prefix, from chunk 0.
        start_chunk: first chunk to store.
        copies: blocks to read. For each group and chunk, all blocks that a server keeps, or none.
        is_held: the worker copies the pages, but sends them to the server only after a `StoreRelease`.
    """

    store_id: int
    digests: tuple[bytes, ...]
    start_chunk: int
    copies: tuple[PageCopy, ...]
    is_held: bool = False


class StoreRelease(msgspec.Struct, frozen=True, array_like=True):
    """Decision on a held store: send it to the server, or drop it."""

    store_id: int
    is_good: bool


@dataclass(frozen=True, slots=True)
class LMCachePlan(KVConnectorMetadata):
    """Plan of one step for the workers. Frozen: a worker in the scheduler's process gets the same object."""

    loads: tuple[PageLoad, ...] = ()
    stores: tuple[PageStore, ...] = ()
    namespace: bytes = b""
    """Namespace of the cache; set in the first plan and in each plan with work."""
    payload_bytes: tuple[int, ...] = ()
    """Page size of each stored group, in bytes, as the scheduler computed it. The name of the cache contains these
    sizes, and a worker may see other layers. Empty: the worker uses its own sizes."""
    releases: tuple[StoreRelease, ...] = ()
    """Decisions on held stores."""
