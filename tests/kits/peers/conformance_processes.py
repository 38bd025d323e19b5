"""Suite for NIXL with the other side in a process of its own, which is stopped and killed."""

from __future__ import annotations

from hybridkv.peers.transport import PENDING, Ranges, TransferDone, TransferFailureReason, Transport
from kits.peers import factories
from kits.peers.memory import pattern
from kits.peers.peer_process import PeerProcess
from kits.peers.suite import TIMEOUT_S, Reader, reason_of, whole

SIZE = 1 << 20
LARGE = 16 << 20


class ProcessConformance:
    """A test derives from it. Memory of the same host can be read from a stopped process too."""

    _made: list[Transport]

    def setup_method(self) -> None:
        self._made = []

    def teardown_method(self) -> None:
        for transport in self._made:
            assert transport.close(TIMEOUT_S)

    def reader(self, size: int = SIZE) -> Reader:
        self._made.append(factories.nixl())
        return Reader(self._made[-1], [size])

    def test_memory_of_another_process_is_read(self) -> None:
        reader = self.reader()
        with PeerProcess([SIZE, 4096]) as peer:
            remote = reader.attach(peer.capability)
            before = [each.copy() for each in reader.regions]
            ranges = Ranges.of([(0, 512 * at, 0, SIZE - 512 * (at + 1), 512) for at in range(2000)])
            assert isinstance(reader.finish(remote, ranges), TransferDone)
            reader.check(peer.regions, ranges, before)

    def test_a_read_returns_the_present_bytes(self) -> None:
        reader = self.reader()
        with PeerProcess([SIZE]) as peer:
            remote = reader.attach(peer.capability)
            assert isinstance(reader.finish(remote, whole(SIZE)), TransferDone)
            assert not (reader.regions[0] == 7).all()
            peer.send({"do": "fill", "region": 0, "value": 7})
            assert isinstance(reader.finish(remote, whole(SIZE)), TransferDone)
            assert (reader.regions[0] == 7).all()

    def test_a_killed_peer_is_gone(self) -> None:
        reader = self.reader()
        with PeerProcess([SIZE]) as peer:
            remote = reader.attach(peer.capability)
            assert isinstance(reader.finish(remote, whole(SIZE)), TransferDone)
            peer.kill()
            assert reason_of(reader.finish(remote, whole(SIZE))) is TransferFailureReason.GONE

    def test_a_peer_killed_before_the_first_read_is_gone(self) -> None:
        reader = self.reader()
        with PeerProcess([SIZE]) as peer:
            remote = reader.attach(peer.capability)
            peer.kill()
            assert reason_of(reader.finish(remote, whole(SIZE))) is TransferFailureReason.GONE

    def test_killing_a_peer_during_a_read_ends_the_read(self) -> None:
        reader = self.reader(LARGE)
        with PeerProcess([LARGE]) as peer:
            remote = reader.attach(peer.capability)
            assert isinstance(reader.finish(remote, whole(64)), TransferDone)
            reader.regions[0][:] = pattern(0, LARGE) ^ 0xFF
            transfer = reader.transport.read(remote, whole(LARGE), TIMEOUT_S)
            first = int(peer.regions[0][0])
            while int(reader.regions[0][0]) != first:
                assert reader.transport.poll(transfer) is PENDING or int(reader.regions[0][0]) == first
            peer.kill()
            state = reader.ended(transfer)
            reader.release(transfer)
            # A read that ended in time has all of it; none is done with half of it.
            is_whole = reader.regions[0].tobytes() == peer.regions[0].tobytes()
            assert is_whole if isinstance(state, TransferDone) else reason_of(state) is TransferFailureReason.GONE
            reader.regions[0][:] = 1
            assert reason_of(reader.finish(remote, whole(64))) in (
                TransferFailureReason.GONE,
                TransferFailureReason.CLOSED,
            )
            assert (reader.regions[0] == 1).all()

    def test_a_read_from_a_stopped_peer_takes_at_most_its_timeout(self) -> None:
        reader = self.reader()
        with PeerProcess([SIZE]) as peer:
            remote = reader.attach(peer.capability)
            assert isinstance(reader.finish(remote, whole(64)), TransferDone)
            peer.stop()
            state = reader.finish(remote, whole(SIZE), timeout_s=0.3)
            assert isinstance(state, TransferDone) or reason_of(state) is TransferFailureReason.TIMEOUT
            reader.regions[0][:] = 1
            peer.go_on()
            peer.send({"do": "fill", "region": 0, "value": 2})
            assert (reader.regions[0] == 1).all()

    def test_a_cancelled_read_writes_nothing_once_it_is_released(self) -> None:
        reader = self.reader()
        with PeerProcess([SIZE]) as peer:
            remote = reader.attach(peer.capability)
            assert isinstance(reader.finish(remote, whole(64)), TransferDone)
            peer.stop()
            transfer = reader.transport.read(remote, whole(SIZE), TIMEOUT_S)
            reader.transport.cancel(transfer)
            state = reader.ended(transfer)
            assert isinstance(state, TransferDone) or reason_of(state) is TransferFailureReason.CANCELLED
            reader.release(transfer)
            reader.regions[0][:] = 1
            peer.go_on()
            peer.send({"do": "fill", "region": 0, "value": 2})
            assert (reader.regions[0] == 1).all()

    def test_a_close_during_a_read_from_a_stopped_peer_writes_nothing_afterwards(self) -> None:
        reader = self.reader()
        with PeerProcess([SIZE]) as peer:
            remote = reader.attach(peer.capability)
            assert isinstance(reader.finish(remote, whole(64)), TransferDone)
            peer.stop()
            transfer = reader.transport.read(remote, whole(SIZE), TIMEOUT_S)
            assert reader.transport.close(TIMEOUT_S)
            reader.regions[0][:] = 1
            peer.go_on()
            peer.send({"do": "fill", "region": 0, "value": 2})
            assert (reader.regions[0] == 1).all()
            assert reader.transport.release(transfer)

    def test_a_restarted_peer_is_attached_again(self) -> None:
        reader = self.reader()
        with PeerProcess([SIZE]) as peer:
            old = reader.attach(peer.capability)
            assert isinstance(reader.finish(old, whole(SIZE)), TransferDone)
        with PeerProcess([SIZE], seed=1) as peer:
            new = reader.attach(peer.capability)
            assert reason_of(reader.finish(old, whole(SIZE))) is TransferFailureReason.GONE
            before = [each.copy() for each in reader.regions]
            assert isinstance(reader.finish(new, whole(SIZE)), TransferDone)
            reader.check(peer.regions, whole(SIZE), before)
