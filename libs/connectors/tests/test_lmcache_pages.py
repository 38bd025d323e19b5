"""Pages of copies, block tables sent to the server, and page headers."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_ranks import DEEPSEEK_V4, MODELS, POOL_BYTES, digests_of, layout_of

from hybridkv.connectors.vllm.common.copies.lowering import Zeros
from hybridkv.connectors.vllm.lmcache.config import LMCacheConfig
from hybridkv.connectors.vllm.lmcache.messages import PageCopy
from hybridkv.connectors.vllm.lmcache.pages import ChunkSpan, PageTransfer, block_tables, page_transfer
from hybridkv.connectors.vllm.lmcache.session import SERVER, WORKER, PageLease, PoolMemory, bad_pages
from hybridkv.connectors.vllm.lmcache.session_spec import SessionSpec, session_spec_of
from hybridkv.lmcache.errors import LMCacheProtocolError
from hybridkv.lmcache.geometry import Geometry, cut_tables
from hybridkv.lmcache.page import PageState, payload_of, seal
from hybridkv.lmcache.pool import Pool, TakenPages
from kits.lmcache.rig import kept_blocks


def session_spec(name: str) -> SessionSpec:
    config = LMCacheConfig(url="tcp://127.0.0.1:1", pool=POOL_BYTES)
    return session_spec_of(config, layout_of(MODELS[name]))


def geometry_of(session_spec: SessionSpec) -> Geometry:
    return Geometry(session_spec.groups, session_spec.chunk_tokens)


@given(st.sampled_from(sorted(MODELS)), st.integers(0, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_tables_for_the_server_equal_the_cut_of_whole_tables(
    name: str, start: int, number: int, chance: random.Random
) -> None:
    """`cut_tables` is the model; pages stand for blocks, and pages that no server keeps are 0."""
    model, where = MODELS[name], session_spec(name)
    geometry, chunks = geometry_of(where), ChunkSpan(start, start + number)
    tables = {
        group: list(range(1000, 1000 + chunks.end * blocks)) for group, blocks in enumerate(geometry.blocks_per_chunk)
    }
    copies = []
    for group, blocks in enumerate(geometry.blocks_per_chunk):
        for chunk in range(chunks.end):
            cut = chance.randrange(blocks + 1)
            first = chunk * blocks
            for low, high in ((0, cut), (cut, blocks)):
                copies.append(PageCopy(group, chunk, low, tuple(tables[group][first + low : first + high])))
    chance.shuffle(copies)
    parts = page_transfer(where, geometry, copies, chunks)
    kept = {group: kept_blocks(geometry, group, number) for group in range(len(model.groups))}
    assert parts.num_pages_by_group == {group: len(each) for group, each in kept.items()}
    assert parts.num_not_kept == sum(
        number * blocks - len(kept[group]) for group, blocks in enumerate(geometry.blocks_per_chunk)
    )
    sent = block_tables(geometry, parts, {part.group: part.block_ids for part in parts.parts})
    whole = cut_tables(geometry, tables, chunks.start * model.chunk_tokens, chunks.end * model.chunk_tokens)
    for group, mine, theirs in zip(geometry.order, sent, whole, strict=True):
        assert mine == [block if at in kept[group] else 0 for at, block in enumerate(theirs)]


def test_a_chunk_without_a_copy_of_a_group_has_zeros() -> None:
    where = session_spec("qwen3-next")
    geometry = geometry_of(where)
    full = [PageCopy(1, chunk, 0, tuple(range(1, 17))) for chunk in (0, 1)]
    parts = page_transfer(where, geometry, [*full, PageCopy(0, 1, 0, (5,))], ChunkSpan(0, 2))
    sent = block_tables(geometry, parts, {0: [7], 1: list(range(1, 33))})
    assert sent[geometry.order.index(0)] == [0, 7]
    assert sent[geometry.order.index(1)] == list(range(1, 33))


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        ([PageCopy(5, 0, 0, (1,))], "group 5 is not stored"),
        ([PageCopy(0, 0, 0, (1, 2))], "2 blocks from 0"),
        ([PageCopy(3, 0, 63, (1, 2))], "2 blocks from 63"),
        ([PageCopy(3, 0, -1, (1,))], "1 blocks from -1"),
        ([PageCopy(3, 0, 3, (1, 2)), PageCopy(3, 0, 4, (2,))], "block 4 of chunk 0 twice"),
    ],
)
def test_invalid_copies_are_refused(copies: list[PageCopy], words: str) -> None:
    where = session_spec("deepseek-v4")
    transfer = page_transfer(where, geometry_of(where), [PageCopy(3, 0, 62, (1, 2))], ChunkSpan(0, 1))
    assert transfer.num_pages_by_group == {3: 2}
    with pytest.raises(ValueError, match=words):
        page_transfer(where, geometry_of(where), copies, ChunkSpan(0, 1))


class SealedPages:
    """Sealed pages of three chunks of DeepSeek-V4. The first chunk is not moved."""

    def __init__(self) -> None:
        self.session_spec = session_spec("deepseek-v4")
        geometry = geometry_of(self.session_spec)
        self.pool = Pool(geometry, 3)
        self.digests = digests_of("pages", 3)
        copies = [
            PageCopy(group, chunk, 0, tuple(range(1, 1 + blocks)))
            for chunk in (1, 2)
            for group, blocks in enumerate(geometry.blocks_per_chunk)
        ]
        self.parts: PageTransfer = page_transfer(self.session_spec, geometry, copies, ChunkSpan(1, 3))
        taken = self.pool.take(self.parts.num_pages_by_group)
        assert taken is not None
        self.given: list[PageLease] = []
        self.memory = PoolMemory(self.pool, {}, Zeros(0, 1))
        self.lease = PageLease(taken, self.memory, 0.0, self.given.append)
        for part in self.parts.parts:
            size, blocks = self.session_spec.groups[part.group].payload_bytes, geometry.blocks_per_chunk[part.group]
            for page, position in zip(taken.blocks[part.group], part.positions, strict=True):
                identity = self.session_spec.identity(
                    self.digests[1 + position // blocks], part.group, position % blocks
                )
                payload_of(self.pool.page(part.group, page), size)[:] = random.Random(page).randbytes(size)
                seal(self.pool.page(part.group, page), identity, size)

    def bad(self) -> list[tuple[int, int, int, PageState]]:
        return [tuple(each) for each in bad_pages(self.parts, self.session_spec, self.lease, self.digests)]


def test_bad_pages_are_reported_once_per_chunk() -> None:
    sealed = SealedPages()
    assert sealed.bad() == []
    pages = sealed.lease.taken.blocks[3]
    for at in (5, 64 + 9, 64 + 11):
        sealed.pool.page(3, pages[at])[70] ^= 1
    assert sealed.bad() == [(1, 3, 5, PageState.CORRUPT), (2, 3, 9, PageState.CORRUPT)]


def test_pages_of_another_prefix_or_group_are_foreign() -> None:
    sealed = SealedPages()
    blocks = sealed.lease.taken.blocks
    for group, other in ((1, 2), (2, 1)):
        assert DEEPSEEK_V4.groups[group] == DEEPSEEK_V4.groups[other]
    one, two = sealed.pool.page(1, blocks[1][0]), sealed.pool.page(2, blocks[2][0])
    one[:], two[:] = bytes(two), bytes(one)
    assert sealed.bad() == [(1, 1, 2, PageState.FOREIGN)]
    sealed = SealedPages()
    sealed.digests = digests_of("other pages", 3)
    assert [(chunk, state) for chunk, _, _, state in sealed.bad()] == [(1, PageState.FOREIGN), (2, PageState.FOREIGN)]


def test_blanked_pages_are_absent_and_others_unchanged() -> None:
    sealed = SealedPages()
    rest = TakenPages(sealed.pool.instance, {0: sealed.lease.taken.blocks[0][:1]})
    before = bytes(sealed.pool.page(0, sealed.lease.taken.blocks[0][1]))
    sealed.memory.blank(rest)
    assert sealed.bad() == [(1, 0, 0, PageState.ABSENT)]
    assert bytes(sealed.pool.page(0, sealed.lease.taken.blocks[0][1])) == before
    sealed.memory.blank(sealed.lease.taken)
    assert [state for *_, state in sealed.bad()] == [PageState.ABSENT] * 2


def test_slots_are_the_payloads_of_pages() -> None:
    sealed = SealedPages()
    for group, size in ((0, 4096), (1, 1000), (3, 72)):
        for page in (3, 1):
            [(offset, num_bytes)] = sealed.memory.slot(group, page, size).extents
            payload = np.frombuffer(payload_of(sealed.pool.page(group, page), size), dtype=np.uint8)
            assert (sealed.memory.base_address + offset, num_bytes) == (payload.ctypes.data, size)
        with pytest.raises(LMCacheProtocolError, match="has no page"):
            sealed.memory.slot(group, sealed.pool.num_blocks[group], size)


@pytest.mark.parametrize("order", [(WORKER, SERVER), (SERVER, WORKER)])
def test_pages_are_returned_when_worker_and_server_are_done(order: tuple[str, str]) -> None:
    sealed = SealedPages()
    for _ in range(2):
        sealed.lease.drop(order[0])
        assert sealed.given == []
    for _ in range(2):
        sealed.lease.drop(order[1])
        assert sealed.given == [sealed.lease]


def test_memory_of_a_renewed_pool_keeps_its_old_content() -> None:
    sealed = SealedPages()
    sealed.pool.recreate()
    now = PoolMemory(sealed.pool, {}, Zeros(0, 1))
    assert now.instance != sealed.memory.instance and now.base_address != sealed.memory.base_address
    assert sealed.bad() == []
    lease = PageLease(sealed.lease.taken, now, 0.0, sealed.given.append)
    assert bad_pages(sealed.parts, sealed.session_spec, lease, sealed.digests) != []


def test_a_session_with_other_pages_has_another_geometry() -> None:
    where = session_spec("deepseek-v4")
    assert geometry_of(where).digest() == geometry_of(replace(where)).digest()
    assert geometry_of(where).digest() != geometry_of(where.with_payload_bytes((1, 2, 3, 4, 5))).digest()
