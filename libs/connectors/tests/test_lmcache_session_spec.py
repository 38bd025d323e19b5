"""Session settings of both halves: pages, the number of chunks with room, and refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.lmcache.config import LMCacheConfig, decode_config
from hybridkv.connectors.vllm.lmcache.session_spec import address_of, num_chunks, page_groups, session_spec_of
from hybridkv.lmcache.geometry import Geometry
from hybridkv.lmcache.keys import prefix_words
from hybridkv.lmcache.pool import Pool
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec

FULL, WINDOW, SCRATCH = GroupKind.FULL, GroupKind.WINDOW, GroupKind.SCRATCH
GROUPS = (
    GroupSpec(FULL, 64, part_tokens=16),
    GroupSpec(SCRATCH, 32),
    GroupSpec(WINDOW, 32, window_tokens=65),
)
PAGES = ((100, 28), (), (500,))


def layout(world_size: int = 1) -> CacheLayout:
    layers = tuple(
        tuple(LayerLayout(f"{index}.{number}", size) for number, size in enumerate(sizes))
        for index, sizes in enumerate(PAGES)
    )
    return CacheLayout(CacheSpec(GROUPS, 256), layers, (), 16, "sha256", world_size)


def config(**keys: Any) -> LMCacheConfig:
    return LMCacheConfig(**{"url": "tcp://127.0.0.1:5555", **keys})


def test_pages_are_the_blocks_of_stored_groups_on_one_rank() -> None:
    first, second = page_groups(layout())
    assert (first.payload_bytes, second.payload_bytes) == (112 + 32, 512)
    assert first.spec == msgspec.structs.replace(GROUPS[0], part_tokens=None) != GROUPS[0]
    assert second.spec == GROUPS[2]
    assert session_spec_of(config(), layout()).group_indexes == (0, 2)


@given(st.integers(1, 64), st.integers(0, 100_000))
def test_a_pool_of_num_chunks_fits_the_given_bytes(chunks: int, spare_bytes: int) -> None:
    groups = page_groups(layout())
    pool = Pool(Geometry(groups, 256), chunks)
    num_bytes = pool.num_bytes
    pool.close()
    counted = num_chunks(groups, 256, num_bytes + spare_bytes)
    if counted:
        fitting = Pool(Geometry(groups, 256), counted)
        assert fitting.num_bytes <= num_bytes + spare_bytes
        fitting.close()
    assert num_chunks(groups, 256, num_bytes + 3 * 4096) >= chunks, "at most the padding is lost"


def test_ranks_share_the_pool_and_a_too_small_pool_is_refused() -> None:
    alone, beside = session_spec_of(config(pool=1 << 20), layout()), session_spec_of(config(pool=1 << 20), layout(2))
    assert 0 < beside.num_chunks <= alone.num_chunks // 2
    with pytest.raises(ConfigurationError) as caught:
        session_spec_of(config(pool=4096), layout(2))
    assert caught.value.path.endswith(".pool")
    needed = int(caught.value.expected.split()[2])
    assert session_spec_of(config(pool=needed), layout(2)).num_chunks == 1
    with pytest.raises(ConfigurationError):
        session_spec_of(config(pool=needed - 2), layout(2))


@pytest.mark.parametrize("url", ["127.0.0.1:5555", "http://127.0.0.1:5555", "tcp://127.0.0.1", ""])
def test_an_invalid_address_is_refused(url: str) -> None:
    assert address_of(decode_config({"url": "tcp://127.0.0.1:5555"})).port == 5555
    with pytest.raises(ConfigurationError) as caught:
        decode_config({"url": url})
    assert caught.value.path.endswith("url")


def test_an_invalid_port_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="http_port: expected a port"):
        decode_config({"url": "tcp://127.0.0.1:5555", "http_port": 0})


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="experimental_cuda: expected a known key") as caught:
        decode_config({"url": "tcp://127.0.0.1:5555", "copies": "native", "experimental_cuda": True})
    assert "known: url, http_port" in caught.value.hint


def test_page_sizes_of_the_scheduler_are_used() -> None:
    spec = session_spec_of(config(), layout())
    larger = spec.with_payload_bytes((1000, 2000))
    assert larger.payload_bytes == (1000, 2000) != spec.payload_bytes
    assert [group.spec for group in larger.groups] == [group.spec for group in spec.groups]
    assert larger.num_chunks < spec.num_chunks


def test_words_and_identities_depend_only_on_the_prefix() -> None:
    spec = session_spec_of(config(), layout())
    assert spec.words([b"one", b"two"]) == prefix_words([b"one", b"two"], 256) != spec.words([b"two", b"one"])
    pages = itertools.product((b"a", b"b"), (0, 1), (0, 1))
    identities = {spec.identity(*page) for page in pages}
    assert len(identities) == 8


def test_pages_of_two_ranks_have_different_identities() -> None:
    specs = [replace(session_spec_of(config(), layout(world_size=2)), rank=rank) for rank in (0, 1)]
    assert specs[0].words([b"one"]) == specs[1].words([b"one"])
    assert specs[0].identity(b"one", 0, 0) != specs[1].identity(b"one", 0, 0)
