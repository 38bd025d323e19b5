"""Mapping between ranks of different tensor-parallel sizes: arithmetic on heads.

Heads are distributed in the same way as in vLLM: equally if there are at least as many heads as ranks; otherwise each
head is replicated on consecutive ranks. Latents are one head that every rank has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple


class HeadShare(NamedTuple):
    """Heads [first, first + num_heads) of the model."""

    first: int
    num_heads: int


class HeadSource(NamedTuple):
    """Heads of the model that one remote rank provides."""

    rank: int
    first: int
    num_heads: int


def head_share(total_heads: int, tp_size: int, rank: int) -> HeadShare | None:
    """Heads that a rank holds; None if heads cannot be distributed equally."""
    if total_heads % tp_size == 0:
        num_heads = total_heads // tp_size
        return HeadShare(rank * num_heads, num_heads)
    if tp_size % total_heads == 0:
        return HeadShare(rank // (tp_size // total_heads), 1)
    return None


@functools.lru_cache(maxsize=4096)
def head_sources(total_heads: int, tp_size: int, rank: int, remote_tp_size: int) -> tuple[HeadSource, ...] | None:
    """Remote ranks and heads that a rank reads, each head once; None if heads cannot be distributed equally.

    If several remote ranks have a head, the local ranks with that head are spread over them.
    """
    share = head_share(total_heads, tp_size, rank)
    if share is None or head_share(total_heads, remote_tp_size, 0) is None:
        return None
    readers = max(1, tp_size // total_heads)
    givers = max(1, remote_tp_size // total_heads)
    found: dict[int, HeadSource] = {}
    for head in range(share.first, share.first + share.num_heads):
        if givers > 1:
            remote = head * givers + rank % readers * givers // readers
        else:
            remote = head // (total_heads // remote_tp_size)
        seen = found.get(remote)
        found[remote] = HeadSource(remote, seen.first if seen else head, seen.num_heads + 1 if seen else 1)
    return tuple(found.values())


def source_ranks(total_heads: Iterable[int], tp_size: int, rank: int, remote_tp_size: int) -> tuple[int, ...] | None:
    """Remote ranks that a rank reads from, ascending; None if the sizes are incompatible.

    Args:
        total_heads: `total_heads` of all pieces. 0: a piece that is not split by heads, read from the same rank number.
        tp_size: tensor-parallel size of the reading engine.
        rank: rank of the reading engine.
        remote_tp_size: tensor-parallel size of the producer.
    """
    ranks: set[int] = set()
    for total in set(total_heads):
        if total == 0 and tp_size != remote_tp_size:
            return None
        sources = head_sources(total, tp_size, rank, remote_tp_size) if total else (HeadSource(rank, 0, 0),)
        if sources is None:
            return None
        ranks.update(source.rank for source in sources)
    return tuple(sorted(ranks))


class RankLink(NamedTuple):
    """Link from a rank of the reading engine to one remote rank.

    Args:
        rank: the remote rank.
        reads: True if bytes are read from the remote rank. If False, only its lease is released.
        reader: index of the local rank among the readers of the remote rank, from 0.
        num_readers: number of ranks that send `LeaseDone` to the remote rank.
    """

    rank: int
    reads: bool
    reader: int
    num_readers: int


def rank_links(total_heads: Iterable[int], tp_size: int, rank: int, remote_tp_size: int) -> tuple[RankLink, ...] | None:
    """Remote ranks that a rank of the reading engine connects to, ascending; None if the sizes are incompatible.

    All ranks of the reading engine together link to every remote rank. Each reader of a remote rank has its own index,
    so the lease on the remote rank ends when all its readers are done. Arguments as for `source_ranks`.
    """
    totals = set(total_heads)
    readers: list[list[int]] = [[] for _ in range(remote_tp_size)]
    for reader in range(tp_size):
        sources = source_ranks(totals, tp_size, reader, remote_tp_size)
        if sources is None:
            return None
        for remote in sources:
            readers[remote].append(reader)
    return tuple(
        RankLink(remote, bool(found), found.index(rank) if found else 0, max(1, len(found)))
        for remote, found in enumerate(readers)
        if rank in (found or (remote % tp_size,))
    )


def release_links(tp_size: int, rank: int, remote_tp_size: int) -> tuple[RankLink, ...]:
    """Links for incompatible sizes: nothing is read, and one rank releases the lease of each remote rank."""
    return tuple(RankLink(remote, False, 0, 1) for remote in range(rank, remote_tp_size, tp_size))
