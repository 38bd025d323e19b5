"""Life of a read: one report, never while a transfer may write, and one release for each connected rank."""

from __future__ import annotations

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv.peers.reads import (
    Abort,
    Cancel,
    Check,
    Checked,
    Command,
    Connected,
    Event,
    PeerLost,
    ReadBounds,
    ReadFailure,
    ReadLife,
    ReadStage,
    ReleaseLease,
    Report,
    Sever,
    Start,
    Tick,
    TransferEnded,
    advance,
    begin,
)

BOUNDS = ReadBounds(connect_s=10, read_s=30, check_s=5, end_s=3)


def run(life: ReadLife, *events: Event, now_s: float = 0.0) -> tuple[ReadLife, list[Command]]:
    commands: list[Command] = []
    for event in events:
        life, more = advance(life, event, now_s)
        commands += more
    return life, commands


def test_a_read_of_two_ranks_is_reported_when_both_are_checked() -> None:
    life = begin((True, True), BOUNDS, 0.0)
    life, commands = run(life, Connected(0), TransferEnded(0), Checked(0), Connected(1), TransferEnded(1))
    assert commands == [Start(0), Check(0), ReleaseLease(0), Start(1), Check(1)]
    life, commands = run(life, Checked(1))
    assert commands == [ReleaseLease(1), Report(None)]
    assert life.is_over


def test_a_rank_without_needed_content_is_released_and_not_awaited() -> None:
    life = begin((True, False), BOUNDS, 0.0)
    life, commands = run(life, Connected(0), TransferEnded(0), Checked(0))
    assert commands[-1] == Report(None)
    assert not life.is_over
    life, commands = run(life, Connected(1))
    assert commands == [ReleaseLease(1)]
    assert life.is_over


def test_a_full_local_prefix_reads_nothing_and_releases_the_lease() -> None:
    life, commands = run(begin((False,), BOUNDS, 0.0), Connected(0))
    assert commands == [ReleaseLease(0)]
    assert life.is_over


def test_a_lease_that_ended_fails_the_request() -> None:
    life, commands = run(begin((True,), BOUNDS, 0.0), Connected(0), TransferEnded(0), Checked(0, ReadFailure.LEASE))
    assert commands[-2:] == [ReleaseLease(0), Report(ReadFailure.LEASE)]
    assert life.peers[0].stage is ReadStage.FAILED


def test_an_aborted_read_is_reported_only_when_its_transfer_has_ended() -> None:
    life, commands = run(begin((True,), BOUNDS, 0.0), Connected(0), Abort())
    assert commands == [Start(0), Cancel(0)]
    life, commands = run(life, Abort(), Checked(0))
    assert commands == []
    life, commands = run(life, TransferEnded(0))
    assert commands == [ReleaseLease(0), Report(ReadFailure.CANCELLED)]


def test_a_transfer_that_does_not_end_is_severed_once_and_awaited() -> None:
    life, _ = run(begin((True,), BOUNDS, 0.0), Connected(0))
    life, commands = run(life, Tick(), now_s=30.0)
    assert commands == [Cancel(0)]
    life, commands = run(life, Tick(), now_s=32.9)
    assert commands == []
    life, commands = run(life, Tick(), Tick(), now_s=33.0)
    assert commands == [Sever(0)]
    assert life.next_deadline_s is None
    life, commands = run(life, TransferEnded(0, ReadFailure.GONE), now_s=99.0)
    assert commands == [ReleaseLease(0), Report(ReadFailure.TIMEOUT)]


def test_a_peer_that_never_answers_fails_the_request_at_its_deadline() -> None:
    life, commands = run(begin((True,), BOUNDS, 0.0), Tick(), now_s=9.9)
    assert commands == []
    life, commands = run(life, Tick(), now_s=10.0)
    assert commands == [Report(ReadFailure.TIMEOUT)]
    assert life.is_over


def test_a_failed_rank_ends_the_others_and_a_late_one_is_released() -> None:
    life, commands = run(
        begin((True, True, True), BOUNDS, 0.0), Connected(0), Connected(1), PeerLost(0, ReadFailure.GONE)
    )
    assert commands == [Start(0), Start(1), Cancel(0), Cancel(1)]
    life, commands = run(life, TransferEnded(0), TransferEnded(1))
    assert commands == [ReleaseLease(0), ReleaseLease(1), Report(ReadFailure.GONE)]
    assert not life.is_over
    life, commands = run(life, Connected(2))
    assert commands == [ReleaseLease(2)]
    assert life.is_over


def test_no_stage_continues_after_the_deadline_of_the_whole_read() -> None:
    bounds = ReadBounds(connect_s=10, read_s=30, check_s=5, end_s=3, whole_s=12)
    life, _ = run(begin((True,), bounds, 0.0), Connected(0), now_s=9.0)
    assert life.next_deadline_s == 12.0
    life, _ = run(life, TransferEnded(0), now_s=11.0)
    life, commands = run(life, Tick(), now_s=11.9)
    assert commands == []
    life, commands = run(life, Tick(), now_s=12.0)
    assert commands == [ReleaseLease(0), Report(ReadFailure.TIMEOUT)]
    assert run(begin((True,), BOUNDS, 0.0), Connected(0), now_s=9.0)[0].next_deadline_s == 39.0


def test_an_abort_may_carry_its_reason() -> None:
    _, commands = run(begin((True,), BOUNDS, 0.0), Abort(ReadFailure.OTHER))
    assert commands == [Report(ReadFailure.OTHER)]


class ReadMachine(RuleBasedStateMachine):
    """Events in any order; transfers end at any time."""

    @initialize(reads=st.lists(st.booleans(), min_size=1, max_size=3))
    def start(self, reads: list[bool]) -> None:
        self.now_s = 0.0
        self.life = begin(tuple(reads), BOUNDS, self.now_s)
        self.wanted = any(reads)
        self.writing: set[int] = set()
        self.checking: set[int] = set()
        self.connected: set[int] = set()
        self.released: list[int] = []
        self.severed: list[int] = []
        self.reports: list[ReadFailure | None] = []
        self.good: set[int] = set()
        self.reads = reads

    def feed(self, event: Event) -> None:
        self.life, commands = advance(self.life, event, self.now_s)
        for command in commands:
            if isinstance(command, Start):
                assert command.peer in self.connected
                self.writing.add(command.peer)
            elif isinstance(command, Check):
                assert command.peer not in self.writing
                self.checking.add(command.peer)
            elif isinstance(command, Cancel | Sever):
                assert command.peer in self.writing
                if isinstance(command, Sever):
                    self.severed.append(command.peer)
            elif isinstance(command, ReleaseLease):
                assert command.peer not in self.writing
                assert command.peer in self.connected
                self.released.append(command.peer)
            else:
                assert not self.writing
                if command.failure is None:
                    assert self.good == {i for i, reads in enumerate(self.reads) if reads}
                self.reports.append(command.failure)

    @rule(peer=st.integers(0, 3))
    def connect(self, peer: int) -> None:
        if peer < len(self.reads) and self.life.peers[peer].stage is ReadStage.CONNECTING:
            self.connected.add(peer)
        self.feed(Connected(peer))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), failure=st.sampled_from([None, None, ReadFailure.GONE, ReadFailure.TRANSPORT]))
    def transfer_ends(self, data: st.DataObject, failure: ReadFailure | None) -> None:
        peer = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.remove(peer)
        self.feed(TransferEnded(peer, failure))

    @precondition(lambda self: self.checking)
    @rule(data=st.data(), failure=st.sampled_from([None, None, ReadFailure.DIGEST, ReadFailure.LEASE]))
    def check_ends(self, data: st.DataObject, failure: ReadFailure | None) -> None:
        peer = data.draw(st.sampled_from(sorted(self.checking)))
        self.checking.remove(peer)
        if failure is None:
            self.good.add(peer)
        self.feed(Checked(peer, failure))

    @rule(peer=st.integers(-1, 3), failure=st.sampled_from([ReadFailure.OTHER, ReadFailure.GONE, ReadFailure.REFUSED]))
    def lose(self, peer: int, failure: ReadFailure) -> None:
        self.feed(PeerLost(peer, failure))

    @rule()
    def abort(self) -> None:
        self.feed(Abort())

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick())
        deadline_s = self.life.next_deadline_s
        assert deadline_s is None or deadline_s > self.now_s

    @invariant()
    def nothing_is_reported_or_released_twice(self) -> None:
        assert len(self.reports) <= self.wanted
        assert len(set(self.released)) == len(self.released)
        assert len(set(self.severed)) == len(self.severed)

    def teardown(self) -> None:
        """Ends all transfers and lets time pass: then every lease has been released."""
        if not hasattr(self, "life"):
            return
        self.now_s += 1000.0
        self.feed(Tick())
        for peer in sorted(self.writing):
            self.writing.remove(peer)
            self.feed(TransferEnded(peer))
        self.now_s += 1000.0
        self.feed(Tick())
        assert self.life.is_over
        assert len(self.reports) == self.wanted
        assert set(self.released) == self.connected


TestReadMachine = ReadMachine.TestCase
TestReadMachine.settings = settings(max_examples=examples(100), stateful_step_count=25, deadline=None)
