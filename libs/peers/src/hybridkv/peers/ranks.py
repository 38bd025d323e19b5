"""Which rank reads from which, where tensor-parallel sizes differ: arithmetic on heads.

Ranks share heads as engines do: as many each where there are at least as many heads as ranks; else every head lies on
several ranks in a row. Latents are one head that lies on every rank.
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
    """Heads of the model that one remote rank gives."""

    rank: int
    first: int
    num_heads: int


def head_share(total_heads: int, tp_size: int, rank: int) -> HeadShare | None:
    """The heads that a rank holds; None where they cannot be shared out equally."""
    if total_heads % tp_size == 0:
        num_heads = total_heads // tp_size
        return HeadShare(rank * num_heads, num_heads)
    if tp_size % total_heads == 0:
        return HeadShare(rank // (tp_size // total_heads), 1)
    return None


@functools.lru_cache(maxsize=4096)
def head_sources(total_heads: int, tp_size: int, rank: int, remote_tp_size: int) -> tuple[HeadSource, ...] | None:
    """From which remote ranks a rank reads which of its heads, each head once; None where heads are not shared equally.

    Where several remote ranks have a head, the local ranks that have it are spread over them.
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
    """The remote ranks that a rank reads from, ascending; None where sizes do not fit.

    Args:
        total_heads: of all pieces; 0 for what is not split by heads and so is read from the same rank alone.
        tp_size: of the side that reads.
        rank: of it.
        remote_tp_size: of the side that is read.
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


def reader_ranks(total_heads: Iterable[int], tp_size: int, rank: int, reader_tp_size: int) -> tuple[int, ...] | None:
    """The ranks of a reader that read from this one: a lease has ended when all of them have said so."""
    totals = set(total_heads)
    readers = []
    for reader in range(reader_tp_size):
        sources = source_ranks(totals, reader_tp_size, reader, tp_size)
        if sources is None:
            return None
        if rank in sources:
            readers.append(reader)
    return tuple(readers)


class RankLink(NamedTuple):
    """What a rank of a reader has to do with one remote rank.

    Args:
        rank: the remote one.
        reads: something is read from it. One that nobody reads from is only told that its lease may end.
        reader: which of its readers this rank is, from 0.
        num_readers: that it has, or is told by.
    """

    rank: int
    reads: bool
    reader: int
    num_readers: int


def rank_links(total_heads: Iterable[int], tp_size: int, rank: int, remote_tp_size: int) -> tuple[RankLink, ...] | None:
    """The remote ranks that a rank of a reader speaks with, ascending; None where sizes do not fit.

    Over all ranks of the reader every remote rank is linked to, and each of its readers has a number of its own: so its
    lease ends when all of them are done. Arguments as for `source_ranks`.
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


def telling_links(tp_size: int, rank: int, remote_tp_size: int) -> tuple[RankLink, ...]:
    """The same for sizes that do not fit: nothing is read, and each remote rank is told by one rank."""
    return tuple(RankLink(remote, False, 0, 1) for remote in range(rank, remote_tp_size, tp_size))
