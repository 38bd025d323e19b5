"""Against real servers of both versions: what was stored is what comes back, byte for byte, and nothing else does."""

import uuid

import pytest
from caches import DEEPSEEK_V4, INTERLEAVED, QWEN3_NEXT, content_of, digests_of

from hybridkv.lmcache.block_ids import needed_blocks
from hybridkv.lmcache.calls import Answer
from hybridkv.lmcache.geometry import PageGroup
from hybridkv.lmcache.page import PageState
from hybridkv.lmcache.testing.rig import Rig
from hybridkv.lmcache.testing.server_process import ServerProcess


@pytest.mark.parametrize(
    "groups", [DEEPSEEK_V4, QWEN3_NEXT, INTERLEAVED], ids=["deepseek_v4", "qwen3_next", "interleaved"]
)
def test_what_a_resume_needs_comes_back_byte_for_byte(server: ServerProcess, groups: tuple[PageGroup, ...]) -> None:
    with Rig(server.address, groups, uuid.uuid4().bytes) as rig:
        digests = digests_of("prompt", 4)
        content = content_of("prompt", rig.geometry, 4)
        assert rig.num_found(digests) == 0
        rig.store_readable(digests, content)
        ended, found, states = rig.retrieve(digests)
        assert ended == Answer(None)
        needed = {group: needed_blocks(rig.geometry, group, 4) for group in range(len(groups))}
        assert states == {PageState.GOOD: sum(map(len, needed.values()))}
        assert found == {group: {at: content[group][at] for at in each} for group, each in needed.items()}
        other = content_of("another prompt", rig.geometry, 4)
        assert found != {group: {at: other[group][at] for at in each} for group, each in needed.items()}
