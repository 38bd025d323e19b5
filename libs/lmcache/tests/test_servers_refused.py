"""Servers that cannot store the cache: refused at the first connection, with both numbers."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from caches import DEEPSEEK_V4, FULL, QWEN3_NEXT, RECURRENT, content_of, digests_of
from real_servers import lmcache_of

from hybridkv.lmcache.calls import CallAnswer, CallFailure, CallFailureReason
from hybridkv.lmcache.connection import Down
from hybridkv.lmcache.geometry import PageGroup
from hybridkv.lmcache.page import PageState
from hybridkv.lmcache.wire import CODECS
from hybridkv.planner import GroupSpec
from kits.lmcache.rig import Rig
from kits.lmcache.server_process import ServerProcess, eventually

BLOCKS_OF_640 = (PageGroup(GroupSpec(RECURRENT, 640), 3000), PageGroup(GroupSpec(FULL, 640), 5000))
FULL_OF_640 = BLOCKS_OF_640[1:]
FULL_OF_256 = (PageGroup(GroupSpec(FULL, 256), 5000),)


@pytest.fixture(scope="module")
def plain_server(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of each version with default options."""
    with ServerProcess(lmcache_of(version), tmp_path_factory.mktemp("plain")) as process:
        yield process


def _refusal(rig: Rig) -> str:
    state = rig.connection.wait_ready(60.0)
    assert isinstance(state, Down) and state.refusal is not None, state
    return str(state.refusal)


def test_a_state_is_refused_by_a_server_without_separate_object_groups(plain_server: ServerProcess) -> None:
    rig = Rig(plain_server.address, QWEN3_NEXT, uuid.uuid4().bytes)
    try:
        assert "--separate-object-groups" in _refusal(rig)
        ended = rig.lookup_when_down(digests_of("refused", 1))
        assert isinstance(ended, CallFailure) and ended.reason is CallFailureReason.UNSENT
    finally:
        rig.close()


def test_windows_are_kept_by_a_server_without_separate_object_groups(plain_server: ServerProcess) -> None:
    with Rig(plain_server.address, DEEPSEEK_V4, uuid.uuid4().bytes) as rig:
        digests = digests_of("together", 3)
        content = content_of("together", rig.geometry, 3)
        rig.store_readable(digests, content)
        assert [rig.num_found(digests[:count]) for count in (1, 2, 3)] == [1, 2, 3]
        _, found, states = rig.retrieve(digests[:2])
        assert set(states) == {PageState.GOOD}
        assert found[0] == {at: content[0][at] for at in range(2)}


def test_a_chunk_of_partial_blocks_is_refused_with_both_numbers(
    plain_server: ServerProcess,
) -> None:
    # Settles the chunk of a server that negotiates, if no other test has.
    with Rig(plain_server.address, DEEPSEEK_V4, uuid.uuid4().bytes):
        pass
    rig = Rig(plain_server.address, FULL_OF_640, uuid.uuid4().bytes)
    try:
        refusal = _refusal(rig)
        assert "640" in refusal and "256" in refusal and "--chunk-size 640" in refusal
    finally:
        rig.close()


@pytest.mark.full
def test_a_server_refuses_other_chunks_than_the_settled_one(version: str, tmp_path: Path) -> None:
    if not CODECS[version].negotiates:
        pytest.skip(f"{version} does not settle it")
    with (
        ServerProcess(lmcache_of(version), tmp_path) as fresh,
        Rig(fresh.address, FULL_OF_640, uuid.uuid4().bytes) as rig,
    ):
        ready = rig.connection.ready
        assert ready is not None and ready.chunk_tokens == 640
        digests = digests_of("negotiated", 2)
        stored = rig.store(digests, content_of("negotiated", rig.geometry, 2))
        assert stored == CallAnswer(None)
        assert eventually(lambda: rig.num_found(digests) == 2)
        # Another engine with blocks that fit the chunk at the server's start, but not the settled one.
        other = Rig(fresh.address, FULL_OF_256, uuid.uuid4().bytes)
        try:
            refusal = _refusal(other)
            assert "256" in refusal and "640" in refusal and "--chunk-size 768" in refusal
        finally:
            other.close()
