"""Real servers of both versions: stored content comes back byte for byte, and nothing else does."""

import uuid

import pytest
from caches import DEEPSEEK_V4, INTERLEAVED, QWEN3_NEXT, content_of, digests_of

from hybridkv.lmcache.calls import CallAnswer, CallFailure, CallFailureReason
from hybridkv.lmcache.connection import ConnectionOptions
from hybridkv.lmcache.geometry import PageGroup
from hybridkv.lmcache.page import PageState
from hybridkv.lmcache.withdrawal import withdraw
from kits.lmcache.rig import Blocks, Rig, needed_blocks
from kits.lmcache.server_process import ServerProcess, eventually


def _needed(rig: Rig, content: Blocks, num_chunks: int, start_chunk: int = 0) -> Blocks:
    """The part of `content` that a resume at `num_chunks` needs when it begins at `start_chunk`."""
    shift = {group: start_chunk * rig.geometry.blocks_per_chunk[group] for group in content}
    return {
        group: {
            shift[group] + at: content[group][shift[group] + at]
            for at in needed_blocks(rig.geometry, group, num_chunks - start_chunk)
        }
        for group in content
    }


@pytest.mark.parametrize(
    "groups", [DEEPSEEK_V4, QWEN3_NEXT, INTERLEAVED], ids=["deepseek_v4", "qwen3_next", "interleaved"]
)
def test_the_blocks_of_a_resume_come_back_byte_for_byte(server: ServerProcess, groups: tuple[PageGroup, ...]) -> None:
    with Rig(server.address, groups, uuid.uuid4().bytes) as rig:
        digests = digests_of("prompt", 4)
        content = content_of("prompt", rig.geometry, 4)
        assert rig.num_found(digests) == 0
        rig.store_readable(digests, content)
        ended, found, states = rig.retrieve(digests)
        assert ended == CallAnswer(None)
        assert set(states) == {PageState.GOOD}
        assert found == _needed(rig, content, 4)
        assert found != _needed(rig, content_of("another prompt", rig.geometry, 4), 4)


def test_a_long_prompt_with_four_block_sizes_is_stored_and_found(server: ServerProcess) -> None:
    with Rig(server.address, DEEPSEEK_V4, uuid.uuid4().bytes, num_chunks=16) as rig:
        digests = digests_of("4096 tokens", 16)
        content = content_of("4096 tokens", rig.geometry, 16)
        assert [len(content[group]) for group in range(5)] == [16, 64, 64, 1024, 512]
        rig.store_readable(digests, content)
        _, found, states = rig.retrieve(digests)
        assert set(states) == {PageState.GOOD}
        assert found == _needed(rig, content, 16)


def test_groups_that_differ_only_in_their_blocks_stay_apart(server: ServerProcess) -> None:
    with Rig(server.address, DEEPSEEK_V4, uuid.uuid4().bytes) as rig:
        assert rig.groups[1] == rig.groups[2]
        layout = server.status()["cache_context_meta"][str(rig.pool.instance)]["kv_cache_layout"]
        assert layout["num_layers"] == 5
        digests = digests_of("twins", 1)
        content = content_of("twins", rig.geometry, 1)
        rig.store_readable(digests, content)
        _, found, _ = rig.retrieve(digests)
        assert found[1] != found[2]
        assert (found[1], found[2]) == (_needed(rig, content, 1)[1], _needed(rig, content, 1)[2])


def test_a_prefix_is_found_only_up_to_where_every_group_has_its_state(server: ServerProcess) -> None:
    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes) as rig:
        digests = digests_of("states", 5)
        content = content_of("states", rig.geometry, 5, states_at=[2, 4])
        stored = rig.store(digests, content)
        assert stored == CallAnswer(None)
        assert eventually(lambda: rig.num_found(digests) == 4)
        assert [rig.num_found(digests[:count]) for count in (1, 2, 3, 4, 5)] == [0, 2, 2, 4, 4]
        _, found, states = rig.retrieve(digests[:3])
        assert set(states) == {PageState.GOOD}
        assert found == _needed(rig, content, 2)


def test_a_longer_prefix_is_stored_after_the_stored_chunks(server: ServerProcess) -> None:
    with Rig(server.address, INTERLEAVED, uuid.uuid4().bytes) as rig:
        digests = digests_of("turns", 4)
        content = content_of("turns", rig.geometry, 4)
        rig.store_readable(digests[:2], content)
        assert rig.num_found(digests) == 2
        rig.store_readable(digests, content, start_chunk=2)
        _, found, states = rig.retrieve(digests)
        assert set(states) == {PageState.GOOD}
        assert found == _needed(rig, content, 4)


def test_a_resume_after_a_local_prefix_reads_only_the_chunks_after_it(server: ServerProcess) -> None:
    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes) as rig:
        digests = digests_of("local", 4)
        content = content_of("local", rig.geometry, 4)
        rig.store_readable(digests, content)
        _, found, states = rig.retrieve(digests, start_chunk=3)
        assert set(states) == {PageState.GOOD}
        assert found == _needed(rig, content, 4, start_chunk=3)


def test_a_missing_block_is_absent(server: ServerProcess) -> None:
    with Rig(server.address, DEEPSEEK_V4, uuid.uuid4().bytes) as rig:
        digests = digests_of("hole", 1)
        content = content_of("hole", rig.geometry, 1)
        del content[3][7]
        rig.store_readable(digests, content)
        _, found, states = rig.retrieve(digests)
        assert states[PageState.ABSENT] == 1
        assert 7 not in found[3]


def test_content_stored_under_another_identity_is_foreign(server: ServerProcess) -> None:
    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes) as rig:
        digests = digests_of("mine", 1)
        rig.store_readable(digests, content_of("mine", rig.geometry, 1))
        ended = rig.lookup(digests)
        assert isinstance(ended, CallAnswer)
        _, found, states = rig.retrieve_found(digests_of("yours", 1), ended.value)
        assert set(states) == {PageState.FOREIGN}
        assert not any(found.values())


def test_caches_with_other_content_or_layout_share_nothing(server: ServerProcess) -> None:
    fingerprint = uuid.uuid4().bytes
    digests = digests_of("shared", 2)
    with Rig(server.address, DEEPSEEK_V4, fingerprint) as rig, Rig(server.address, DEEPSEEK_V4, fingerprint) as same:
        rig.store_readable(digests, content_of("shared", rig.geometry, 2))
        assert same.num_found(digests) == 2
        with Rig(server.address, DEEPSEEK_V4, uuid.uuid4().bytes) as other:
            assert other.num_found(digests) == 0
        with Rig(server.address, DEEPSEEK_V4[:4], fingerprint) as other:
            assert other.num_found(digests) == 0


def test_ranks_read_their_own_part_of_a_common_prefix(server: ServerProcess) -> None:
    fingerprint = uuid.uuid4().bytes
    digests = digests_of("ranks", 2)
    rigs = [Rig(server.address, QWEN3_NEXT, fingerprint, rank=rank, world_size=2).ready() for rank in (0, 1)]
    try:
        contents = [content_of(("ranks", rank), rigs[rank].geometry, 2) for rank in (0, 1)]
        rigs[0].store_readable(digests, contents[0])
        all_ranks = rigs[0].lookup(digests, rank=None)
        assert isinstance(all_ranks, CallAnswer) and all_ranks.value.num_chunks == 0
        rigs[1].store_readable(digests, contents[1])
        all_ranks = rigs[0].lookup(digests, rank=None)
        assert isinstance(all_ranks, CallAnswer) and all_ranks.value.num_chunks == 2
        for rig, content in zip(rigs, contents, strict=True):
            _, found, states = rig.retrieve(digests, start_chunk=1)
            assert set(states) == {PageState.GOOD}
            assert found == _needed(rig, content, 2, start_chunk=1)
        rigs[0].operations.release(all_ranks.value)
        assert eventually(lambda: _locks(server) == (0, 0))
    finally:
        for rig in rigs:
            rig.close()


def test_no_lock_and_no_session_is_left(server: ServerProcess) -> None:
    with Rig(server.address, DEEPSEEK_V4, uuid.uuid4().bytes) as rig:
        digests = digests_of("locks", 4)
        rig.store_readable(digests, content_of("locks", rig.geometry, 4))
        held = rig.lookup(digests)
        assert isinstance(held, CallAnswer)
        assert _locks(server)[0] > 0
        rig.operations.release(held.value)
        rig.retrieve(digests)
        rig.retrieve(digests, start_chunk=2)
        assert rig.num_found(digests_of("nothing", 2)) == 0
        assert eventually(lambda: _locks(server) == (0, 0))
        assert rig.pool.num_taken == 0
        counts = rig.operations.counts()
        assert (counts.lookups, counts.found, counts.stores, counts.retrieves) == (4, 3, 1, 2)
        assert (counts.stored_chunks, counts.retrieved_chunks, counts.failures) == (4, 4 + 2, {})


def test_a_withdrawn_chunk_is_not_found_and_the_rest_is(server: ServerProcess) -> None:
    with Rig(server.address, DEEPSEEK_V4, uuid.uuid4().bytes) as rig:
        digests, others = digests_of("withdrawn", 3), digests_of("kept", 3)
        for each in (digests, others):
            rig.store_readable(each, content_of(each, rig.geometry, 3))
        withdraw(rig.connection, rig.prefix(digests), rig.rank, 1, len(rig.groups))
        assert eventually(lambda: rig.num_found(digests) == 1)
        assert rig.num_found(others) == 3
        rig.store_readable(digests, content_of("anew", rig.geometry, 3), start_chunk=1)
        assert rig.num_found(digests) == 3


def test_a_pool_that_a_server_forgot_is_registered_again(server: ServerProcess) -> None:
    # A heartbeat would register the pool before the store.
    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes, options=ConnectionOptions(beat_s=1e6)) as rig:
        digests = digests_of("forgotten", 1)
        content = content_of("forgotten", rig.geometry, 1)
        ready = rig.connection.ready
        assert ready is not None
        rig.ask(ready.codec.unregister(rig.pool.instance))
        ended = rig.store(digests, content)
        assert isinstance(ended, CallFailure) and ended.reason is CallFailureReason.REFUSED
        assert eventually(lambda: rig.store(digests, content) == CallAnswer(None))
        assert eventually(lambda: rig.num_found(digests) == 1)


def _locks(server: ServerProcess) -> tuple[int, int]:
    """Number of objects locked for reading, and of sessions."""
    status = server.status()
    return status["storage_manager"]["l1_manager"]["read_locked_count"], status["active_sessions"]
