"""Every head is read once, from a rank that has it, and every producer rank knows its readers."""

from __future__ import annotations

import pytest

from hybridkv.peers.ranks import (
    HeadShare,
    HeadSource,
    RankLink,
    head_share,
    head_sources,
    rank_links,
    release_links,
    source_ranks,
)

SIZES = [1, 2, 4, 8]


def test_heads_are_split_equally_or_repeated_on_consecutive_ranks() -> None:
    assert [head_share(8, 4, rank) for rank in range(4)] == [HeadShare(2 * rank, 2) for rank in range(4)]
    assert [head_share(2, 4, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert head_share(6, 4, 0) is None


@pytest.mark.parametrize("total_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("ours", SIZES)
@pytest.mark.parametrize("theirs", SIZES)
def test_every_head_of_a_rank_is_read_once_from_a_rank_that_has_it(total_heads: int, ours: int, theirs: int) -> None:
    for rank in range(ours):
        share = head_share(total_heads, ours, rank)
        sources = head_sources(total_heads, ours, rank, theirs)
        assert share is not None and sources is not None
        heads = []
        for source in sources:
            there = head_share(total_heads, theirs, source.rank)
            assert there is not None
            wanted = range(source.first, source.first + source.num_heads)
            assert set(wanted) <= set(range(there.first, there.first + there.num_heads))
            heads += wanted
        assert heads == list(range(share.first, share.first + share.num_heads))


def test_readers_of_a_head_on_several_ranks_are_spread_over_them() -> None:
    assert [head_sources(1, 4, rank, 4) for rank in range(4)] == [(HeadSource(rank, 0, 1),) for rank in range(4)]
    assert [head_sources(1, 4, rank, 2) for rank in range(4)] == [(HeadSource(rank // 2, 0, 1),) for rank in range(4)]
    assert [head_sources(2, 1, 0, 4)] == [(HeadSource(0, 0, 1), HeadSource(2, 1, 1))]


def test_content_without_heads_is_read_from_the_same_rank_of_equal_tp_sizes() -> None:
    assert source_ranks([0], 4, 3, 4) == (3,)
    assert source_ranks([0, 8], 4, 3, 2) is None
    assert source_ranks([6], 2, 0, 4) is None


@pytest.mark.parametrize("totals", [(8, 2, 1), (1,), (8,)])
@pytest.mark.parametrize("ours", SIZES)
@pytest.mark.parametrize("theirs", SIZES)
def test_every_remote_rank_is_linked_to_all_of_its_readers_and_no_other(
    ours: int, theirs: int, totals: tuple[int, ...]
) -> None:
    linked = {rank: rank_links(totals, ours, rank, theirs) for rank in range(ours)}
    for remote in range(theirs):
        readers = tuple(rank for rank in linked if remote in (source_ranks(totals, ours, rank, theirs) or ()))
        linked_ranks = [(rank, link) for rank, links in linked.items() for link in links or () if link.rank == remote]
        assert [link.reader for _, link in linked_ranks] == list(range(len(linked_ranks)))
        assert {link.num_readers for _, link in linked_ranks} == {len(linked_ranks)}
        if readers:
            assert tuple(rank for rank, _ in linked_ranks) == readers and all(link.reads for _, link in linked_ranks)
        else:
            assert len(linked_ranks) == 1 and not linked_ranks[0][1].reads
    for rank, links in linked.items():
        assert tuple(link.rank for link in links or () if link.reads) == source_ranks(totals, ours, rank, theirs)


def test_sizes_that_do_not_fit_link_each_remote_rank_once_without_reads() -> None:
    assert rank_links([0, 8], 2, 0, 4) is None
    assert rank_links([0, 8], 4, 3, 4) == (RankLink(3, True, 0, 1),)
    linked_ranks = [link.rank for rank in range(3) for link in release_links(3, rank, 5)]
    assert sorted(linked_ranks) == [0, 1, 2, 3, 4]
    assert release_links(3, 2, 2) == ()
