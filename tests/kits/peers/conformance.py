"""Suite that every transport must pass, with both sides in one process. A test derives from it and defines
`make_transport`.

Uses no test framework: any runner that collects `test_*` methods of classes will do.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.transport import (
    Ranges,
    Region,
    RemoteId,
    TransferDone,
    TransferFailed,
    TransferFailureReason,
    TransferId,
    Transport,
)
from kits.peers.memory import pattern, poisoned, region_of
from kits.peers.suite import TIMEOUT_S, Reader, reason_of, whole

SIZES = (65536, 4096, 200_000)
HUGE = (1 << 63) - 1


class TransportConformance:
    """Two transports of one kind. `teardown_method`, called by the runner, closes them."""

    sees_every_read = True
    """Whether the side that is read from checks each read itself."""
    _made: list[Transport]

    def make_transport(self, max_transfers: int = 64) -> Transport:
        raise NotImplementedError

    def setup_method(self) -> None:
        self._made = []

    def teardown_method(self) -> None:
        for transport in self._made:
            assert transport.close(TIMEOUT_S)

    def transport(self, max_transfers: int = 64) -> Transport:
        self._made.append(self.make_transport(max_transfers))
        return self._made[-1]

    def pair(self) -> tuple[Reader, Reader, RemoteId]:
        """(reader, owner of the memory, the reader's id of the owner)"""
        owner = Reader(self.transport(), SIZES, self._made)
        for number, region in enumerate(owner.regions):
            region[:] = pattern(number, len(region))
        reader = Reader(self.transport(), SIZES, self._made)
        return reader, owner, reader.attach(owner.capability)

    def expect_read(self, rows: list[tuple[int, int, int, int, int]]) -> TransferDone:
        reader, owner, remote = self.pair()
        before = [each.copy() for each in reader.regions]
        ranges = Ranges.of(rows)
        state = reader.finish(remote, ranges)
        assert isinstance(state, TransferDone), state
        reader.check(owner.regions, ranges, before)
        assert state.num_bytes == ranges.total_bytes
        return state

    def expect_refused(self, *reads: list[tuple[int, int, int, int, int]]) -> None:
        """Requires that each of these reads is refused."""
        reader, _, remote = self.pair()
        before = [each.copy() for each in reader.regions]
        for rows in reads:
            state = reader.finish(remote, Ranges.of(rows))
            assert reason_of(state) is TransferFailureReason.REFUSED, (rows, state)
            reader.check([], Ranges.of([]), before)

    def test_a_transport_is_a_transport(self) -> None:
        assert isinstance(self.transport(), Transport)

    def test_exactly_the_bytes_of_the_ranges_are_read(self) -> None:
        rows = [(0, 100, 2, 7, 5000), (1, 0, 0, 60000, 4096), (2, 199_999, 1, 0, 1), (0, 0, 0, 0, 100)]
        assert self.expect_read(rows).num_descriptors == len(rows)

    def test_the_check_of_the_suite_notices_bytes_of_another_place(self) -> None:
        reader, owner, remote = self.pair()
        before = [each.copy() for each in reader.regions]
        assert isinstance(reader.finish(remote, Ranges.of([(0, 0, 0, 1, 4096)])), TransferDone)
        try:
            reader.check(owner.regions, Ranges.of([(0, 0, 0, 0, 4096)]), before)
        except AssertionError:
            return
        raise RuntimeError("the check of this suite does not notice bytes of another place")

    def test_thousands_of_small_ranges_are_read(self) -> None:
        numbers = list(range(4096))
        random.Random(1).shuffle(numbers)
        self.expect_read([(2, 16 * number, 0, 16 * at, 16) for at, number in enumerate(numbers)])

    def test_adjacent_ranges_are_joined_without_mixing_them_up(self) -> None:
        self.expect_read([(2, 1000 + 8 * at, 2, 8 * at, 8) for at in range(3000)])

    def test_one_place_may_be_read_into_many(self) -> None:
        self.expect_read([(0, 64 * at, 1, 128, 64) for at in range(500)])

    def test_a_range_longer_than_one_transfer_is_read(self) -> None:
        self.expect_read([(2, 0, 2, 0, SIZES[2])])

    def test_an_empty_read_is_done_at_once(self) -> None:
        reader, _, remote = self.pair()
        transfer = reader.transport.read(remote, Ranges.of([]), 1.0)
        state = reader.transport.poll(transfer)
        assert isinstance(state, TransferDone)
        assert state.num_bytes == 0
        assert reader.transport.release(transfer)

    def test_a_range_outside_the_local_memory_is_refused_before_a_byte_moves(self) -> None:
        good = (0, 0, 0, 0, 64)
        wrong = [(0, SIZES[0] - 7, 8), (3, 0, 8), (-1, 0, 8), (0, -8, 8), (0, HUGE, HUGE)]
        self.expect_refused(*([good, (region, offset, 0, 0, size)] for region, offset, size in wrong))

    def test_a_range_outside_the_peers_memory_is_refused(self) -> None:
        wrong = [(1, SIZES[1] - 7, 8), (3, 0, 8), (-1, 0, 8), (0, -8, 8), (0, HUGE, 64)]
        self.expect_refused(*([(0, 0, region, offset, size)] for region, offset, size in wrong))

    def test_an_empty_range_is_refused(self) -> None:
        self.expect_refused([(0, 0, 0, 0, 0)], [(0, 0, 0, 0, -64)])

    def test_an_invalid_capability_is_refused(self) -> None:
        reader, owner, _ = self.pair()
        good = owner.capability
        for data in (b"", b"\0" * 40, b"\xdd\xff\xff\xff\xff", good[: len(good) // 2], reader.capability):
            assert reason_of(reader.transport.attach(data)) is TransferFailureReason.REFUSED, data  # type: ignore[arg-type]

    def test_a_later_region_is_read_after_a_new_attach(self) -> None:
        reader, owner, _ = self.pair()
        late = pattern(9, 1024)
        remote = reader.attach(owner.transport.register([region_of(late)]))
        before = [each.copy() for each in reader.regions]
        ranges = Ranges.of([(0, 0, 3, 0, 1024)])
        assert isinstance(reader.finish(remote, ranges), TransferDone)
        reader.check([*owner.regions, late], ranges, before)

    def test_a_deregistered_region_is_not_read_and_the_others_keep_their_numbers(self) -> None:
        reader, owner, remote = self.pair()
        assert isinstance(reader.finish(remote, whole(64)), TransferDone)
        owner.transport.deregister([0])
        owner.regions[0][:] = 0
        before = [each.copy() for each in reader.regions]
        if self.sees_every_read:
            assert reason_of(reader.finish(remote, whole(64))) is TransferFailureReason.REFUSED
        assert isinstance(reader.finish(remote, whole(64, region=2)), TransferDone)
        reader.check(owner.regions, whole(64, region=2), before)
        again = reader.attach(owner.transport.register([]))
        assert reason_of(reader.finish(again, whole(64))) is TransferFailureReason.REFUSED

    def test_reads_of_a_detached_peer_fail(self) -> None:
        reader, _, remote = self.pair()
        reader.transport.detach(remote)
        reader.transport.detach(remote)
        assert reason_of(reader.finish(remote, whole(64))) is TransferFailureReason.CLOSED

    def test_a_peer_is_attached_until_it_is_detached(self) -> None:
        reader, owner, remote = self.pair()
        transport = reader.transport
        assert transport.is_attached(remote)
        assert isinstance(reader.finish(remote, whole(64)), TransferDone)
        assert transport.is_attached(remote)
        transport.detach(remote)
        again = reader.attach(owner.capability)
        assert not transport.is_attached(remote) and transport.is_attached(again)

    def test_a_peer_that_is_attached_twice_is_detached_one_at_a_time(self) -> None:
        """A peer reached by two addresses is attached twice; then one of the two connections ends."""
        reader, owner, first = self.pair()
        second = reader.attach(owner.capability)
        for remote in (first, second):
            assert isinstance(reader.finish(remote, whole(64)), TransferDone)
        reader.transport.detach(first)
        assert reason_of(reader.finish(first, whole(64))) is TransferFailureReason.CLOSED
        before = [each.copy() for each in reader.regions]
        assert isinstance(reader.finish(second, whole(4096, region=1)), TransferDone)
        reader.check(owner.regions, whole(4096, region=1), before)
        reader.transport.detach(second)
        assert reason_of(reader.finish(second, whole(64))) is TransferFailureReason.CLOSED
        assert isinstance(reader.finish(reader.attach(owner.capability), whole(64)), TransferDone)

    def test_more_reads_than_allowed_are_refused_and_change_nothing(self) -> None:
        owner = Reader(self.transport(), SIZES, neighbours=self._made)
        reader = Reader(self.transport(max_transfers=2), SIZES, neighbours=self._made)
        remote = reader.attach(owner.capability)
        transfers = [reader.transport.read(remote, whole(64), TIMEOUT_S) for _ in range(3)]
        states = [reader.ended(transfer) for transfer in transfers]
        assert [reason_of(state) for state in states] == [None, None, TransferFailureReason.BUSY]
        for transfer in transfers:
            reader.release(transfer)
        assert isinstance(reader.finish(remote, whole(64)), TransferDone)

    def test_several_reads_run_concurrently(self) -> None:
        reader, owner, remote = self.pair()
        before = [each.copy() for each in reader.regions]
        parts = [Ranges.of([(2, 10_000 * at, 2, 10_000 * at, 10_000)]) for at in range(20)]
        transfers = [reader.transport.read(remote, part, TIMEOUT_S) for part in parts]
        for transfer in reversed(transfers):
            assert isinstance(reader.ended(transfer), TransferDone)
            reader.release(transfer)
        reader.check(owner.regions, whole(200_000, region=2), before)

    def test_a_state_remains_until_it_is_released(self) -> None:
        reader, _, remote = self.pair()
        transfer = reader.transport.read(remote, whole(64), TIMEOUT_S)
        state = reader.ended(transfer)
        reader.transport.cancel(transfer)
        assert reader.transport.poll(transfer) == state
        assert reader.transport.release(transfer)
        assert reader.transport.release(transfer)

    def test_a_released_read_writes_nothing(self) -> None:
        reader, _, remote = self.pair()
        for _ in range(20):
            transfer = reader.transport.read(remote, whole(SIZES[2], region=2), TIMEOUT_S)
            reader.release(transfer)
            reader.regions[2][:] = 1
            assert isinstance(reader.finish(remote, whole(64)), TransferDone)
            assert (reader.regions[2] == 1).all()

    def test_a_close_ends_reads_and_writes_nothing_afterwards(self) -> None:
        reader, _, remote = self.pair()
        transfers = [reader.transport.read(remote, whole(SIZES[2], region=2), TIMEOUT_S) for _ in range(8)]
        assert reader.transport.close(TIMEOUT_S)
        reader.regions[2][:] = 1
        for transfer in transfers:
            assert isinstance(reader.transport.poll(transfer), TransferDone | TransferFailed)
            assert reader.transport.release(transfer)
        assert (reader.regions[2] == 1).all()
        assert reader.transport.close(TIMEOUT_S)

    def test_invalid_calls_are_protocol_errors(self) -> None:
        reader, _, remote = self.pair()
        transport = reader.transport
        memory = poisoned(64)
        calls: list[Callable[[], object]] = [
            lambda: transport.poll(TransferId(10_000)),
            lambda: transport.cancel(TransferId(10_000)),
            lambda: transport.register([Region(0, 64)]),
            lambda: transport.register([Region(memory.ctypes.data, 0)]),
            lambda: transport.deregister([17]),
        ]
        for call in calls:
            self._expect_error(call)
        assert transport.close(TIMEOUT_S)
        self._expect_error(lambda: transport.read(remote, whole(64), 1.0))
        self._expect_error(lambda: transport.register([]))
        self._expect_error(lambda: transport.attach(b""))

    def _expect_error(self, call: Callable[[], object]) -> None:
        try:
            call()
        except PeersProtocolError:
            return
        raise AssertionError("no error")
