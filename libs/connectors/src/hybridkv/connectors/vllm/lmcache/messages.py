"""What travels between the connector's two halves: plans to the workers. Outcomes come back as `StepOutcome`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one group in one chunk of the server, each of which is one page.

    Args:
        group_index: the engine's group.
        chunk: of the prefix, from 0.
        first_block: where `block_ids` begin among the group's blocks in the chunk.
        block_ids: the engine's blocks, in token order.
    """

    group_index: int
    chunk: int
    first_block: int
    block_ids: tuple[int, ...]


class PageLoad(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one request loads.

    Args:
        request_id: of the request.
        digests: what names each chunk of the prefix that is resumed, from the first.
        start_chunk: from which on chunks are retrieved.
        copies: which blocks are written.
        refused: why it must fail without a byte moved.
    """

    request_id: str
    digests: tuple[bytes, ...]
    start_chunk: int
    copies: tuple[PageCopy, ...]
    refused: str | None = None


class PageStore(msgspec.Struct, frozen=True, array_like=True):
    """What one request stores after a step: chunks from `start_chunk` to the end of `digests`.

    A group that has no copy in a chunk has nothing there: a window that was given up, a state that never was.

    Args:
        store_id: of the store.
        digests: what names each chunk of the prefix, from the first.
        start_chunk: the first that is stored.
        copies: which blocks are read. Of each group all or none that a server keeps of a chunk.
        is_held: it is copied, and handed over only when a `Release` says so.
    """

    store_id: int
    digests: tuple[bytes, ...]
    start_chunk: int
    copies: tuple[PageCopy, ...]
    is_held: bool = False


class Release(msgspec.Struct, frozen=True, array_like=True):
    """Of a store that is held: it may be handed over, or must be dropped."""

    store_id: int
    is_good: bool


@dataclass(frozen=True, slots=True)
class LMCachePlan(KVConnectorMetadata):
    """Scheduler to workers, once a step. A worker in the scheduler's process is given the same one, so it is frozen."""

    loads: tuple[PageLoad, ...] = ()
    stores: tuple[PageStore, ...] = ()
    namespace: bytes = b""
    """Whose content it is, with the first plan and with whatever needs it."""
    payload_bytes: tuple[int, ...] = ()
    """Of one page of each stored group, as the scheduler knows them, beside the namespace: a worker knows layers that
    it was not told, and the name of a cache is made of these. None: the worker's own are the same."""
    releases: tuple[Release, ...] = ()
    """Of stores that are held."""
