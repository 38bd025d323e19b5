"""Servers that are killed, stopped, restarted, or have a corrupt disk: nothing hangs, and wrong bytes are found."""

import json
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import patience
import pytest
from caches import DEEPSEEK_V4, QWEN3_NEXT, content_of, digests_of
from real_servers import lmcache_of

from hybridkv.lmcache.calls import MAY_STILL_RUN, NOT_SENT, CallAnswer, CallFailure, CallFailureReason, CallResult
from hybridkv.lmcache.connection import ConnectionOptions, Down, Ready, ServerAddress
from hybridkv.lmcache.page import PageState
from hybridkv.lmcache.withdrawal import withdraw
from kits.lmcache.rig import Rig
from kits.lmcache.server_process import ServerProcess, eventually

SOON = ConnectionOptions(call_timeout_s=patience.seconds(0.3), beat_s=0.2, retry_s=0.1, retry_max_s=0.5)
GOOD, CORRUPT = PageState.GOOD, PageState.CORRUPT


class ServerSite:
    """Directory and address with which a server with a disk is started, killed and started again."""

    def __init__(self, lmcache: Sequence[str], directory: Path) -> None:
        self.disk = directory / "disk"
        self.disk.mkdir(exist_ok=True)
        self._lmcache, self._directory = lmcache, directory
        self._address: ServerAddress | None = None
        self.server = self.start()

    def start(self) -> ServerProcess:
        disk = json.dumps({"type": "fs_native", "base_path": str(self.disk)})
        arguments = ["--chunk-size", "256", "--separate-object-groups", "--l2-adapter", disk]
        self.server = ServerProcess(self._lmcache, self._directory, arguments, self._address).wait()
        self._address = self.server.address
        return self.server

    def files(self) -> list[Path]:
        """The complete files on the disk."""
        return sorted(path for path in self.disk.rglob("*") if path.is_file() and ".tmp" not in path.name)

    def has_written(self, num_files: int) -> bool:
        status = self.server.status()["storage_manager"]["store_controller"]
        return (
            len(self.files()) == num_files and not status["pending_keys_count"] and not status["in_flight_task_count"]
        )


@pytest.fixture(scope="module")
def site(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSite]:
    """One per version, since a server with a disk takes longest to start."""
    site = ServerSite(lmcache_of(version), tmp_path_factory.mktemp("site"))
    try:
        yield site
    finally:
        site.server.kill()


@pytest.mark.full
def test_a_new_server_reads_the_disk_of_the_old_one_and_a_changed_byte_is_found(site: ServerSite) -> None:
    with Rig(site.server.address, DEEPSEEK_V4, uuid.uuid4().bytes, options=SOON) as rig:
        digests = digests_of("disk", 2)
        content = content_of("disk", rig.geometry, 2)
        before = set(site.files())
        rig.store_readable(digests, content)
        # Two chunks, each with one object of full attention and one of windows.
        assert eventually(lambda: site.has_written(len(before) + 4)), site.files()
        site.server.kill()
        assert eventually(lambda: isinstance(rig.connection.state, Down))
        ended = rig.lookup(digests)
        assert isinstance(ended, CallFailure) and ended.reason in NOT_SENT
        site.start()
        rig.ready()
        _, found, states = rig.retrieve(digests)
        assert set(states) == {GOOD}
        assert found[0] == content[0]
        site.server.kill()
        for path in set(site.files()) - before:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        assert eventually(lambda: isinstance(rig.connection.state, Down))
        site.start()
        rig.ready()
        ended, found, states = rig.retrieve(digests)
        assert ended == CallAnswer(None), "the server reports success"
        assert (
            states[CORRUPT] == 3
        )  # middle bytes: one of full attention in each chunk, one of windows in the last chunk
        assert all(content[group][at] == data for group in found for at, data in found[group].items())
        for chunk in range(2):
            withdraw(rig.connection, rig.prefix(digests), rig.rank, chunk, len(rig.groups))
        assert eventually(lambda: rig.num_found(digests) == 0)
        rig.store_readable(digests, content)
        _, found, states = rig.retrieve(digests)
        assert set(states) == {GOOD}


def test_a_server_killed_during_calls_ends_every_call_and_serves_again(site: ServerSite) -> None:
    with Rig(site.server.address, QWEN3_NEXT, uuid.uuid4().bytes, num_chunks=16, options=SOON) as rig:
        digests = [digests_of(("killed", number), 2) for number in range(4)]
        contents = [content_of(("killed", number), rig.geometry, 2) for number in range(4)]
        rig.store_readable(digests[0], contents[0])
        site.server.signal(signal.SIGSTOP)  # so that the calls are certainly in flight
        ended: list[CallResult[None]] = []
        threads = [
            threading.Thread(target=lambda n=n: ended.append(rig.store(digests[n], contents[n]))) for n in (1, 2, 3)
        ]
        threads.append(threading.Thread(target=lambda: ended.append(rig.retrieve(digests[0])[0])))
        for thread in threads:
            thread.start()
        assert eventually(lambda: rig.connection.channel.num_open >= 4)
        site.server.kill()
        for thread in threads:
            thread.join(patience.seconds(30.0))
        assert len(ended) == 4
        assert all(isinstance(each, CallFailure) and each.reason in MAY_STILL_RUN | NOT_SENT for each in ended), ended
        instance = rig.pool.instance
        # A heartbeat that is still waiting would find a server that starts soon.
        assert eventually(lambda: isinstance(rig.connection.state, Down))
        site.start()
        rig.ready()
        assert rig.pool.instance != instance, "in-flight calls use the old memory"
        assert rig.pool.num_taken == 0
        again = digests_of("after", 2)
        rig.store_readable(again, content_of("after", rig.geometry, 2))
        _, _, states = rig.retrieve(again)
        assert set(states) == {GOOD}


def test_a_stopped_server_costs_the_deadline(site: ServerSite) -> None:
    with Rig(site.server.address, QWEN3_NEXT, uuid.uuid4().bytes, options=SOON) as rig:
        digests = digests_of("stopped", 1)
        content = content_of("stopped", rig.geometry, 1)
        site.server.signal(signal.SIGSTOP)
        ended = rig.store(digests, content, timeout_s=patience.seconds(0.05))
        assert isinstance(ended, CallFailure) and ended.reason in MAY_STILL_RUN
        assert rig.pool.num_taken == 4, "the server may still read them"
        assert eventually(lambda: isinstance(rig.connection.state, Down))
        lookup = rig.lookup(digests, timeout_s=0.5)
        assert isinstance(lookup, CallFailure) and lookup.reason is CallFailureReason.UNSENT
        site.server.signal(signal.SIGCONT)
        assert eventually(lambda: isinstance(rig.connection.state, Ready))
        assert rig.pool.num_taken == 0
        rig.store_readable(digests_of("goes on", 1), content_of("goes on", rig.geometry, 1))
        assert eventually(lambda: rig.pool.instance in site.server.status()["registered_gpu_ids"])


def test_an_engine_that_leaves_is_unregistered(site: ServerSite) -> None:
    with Rig(site.server.address, QWEN3_NEXT, uuid.uuid4().bytes, options=SOON) as rig:
        instance = rig.pool.instance
        assert instance in site.server.status()["registered_gpu_ids"]
        rig.connection.close(patience.seconds(2.0))
    assert eventually(lambda: instance not in site.server.status()["registered_gpu_ids"])
