"""NIXL, the in-memory transport, and an idle fault injector over it pass the same suite."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kits.peers.conformance", "kits.peers.suite")

from hybridkv.peers.transport import TransferDone, TransferFailureReason, Transport  # noqa: E402
from kits.peers import factories  # noqa: E402
from kits.peers.conformance import TransportConformance  # noqa: E402
from kits.peers.conformance_processes import ProcessConformance  # noqa: E402
from kits.peers.faults import FaultInjectingTransport, FaultPlan  # noqa: E402
from kits.peers.in_memory import InMemoryTransport, World  # noqa: E402
from kits.peers.suite import TIMEOUT_S, reason_of, whole  # noqa: E402


class TestInMemory(TransportConformance):
    def setup_method(self) -> None:
        super().setup_method()
        self.world = World()

    def make_transport(self, max_transfers: int = 64) -> Transport:
        return InMemoryTransport(factories.fresh_name(), self.world, max_transfers)


class TestFaultInjecting(TestInMemory):
    def make_transport(self, max_transfers: int = 64) -> Transport:
        return FaultInjectingTransport(super().make_transport(max_transfers), FaultPlan())


class TestNixl(TransportConformance):
    sees_every_read = False

    def make_transport(self, max_transfers: int = 64) -> Transport:
        return factories.nixl(max_transfers)

    @pytest.mark.parametrize("call", ["transfer", "check_xfer_state"])
    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            ("nixlRemoteDisconnectError", TransferFailureReason.GONE),
            ("nixlBackendError", TransferFailureReason.BROKEN),
        ],
    )
    def test_a_peer_with_a_broken_connection_is_read_again_after_a_new_attach(
        self, call: str, error: str, reason: TransferFailureReason, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NIXL never repairs the connection to a peer once it is broken, even if the peer still runs.

        All attachments share the connection.
        """
        reader, owner, remote = self.pair()
        other = reader.attach(owner.capability)
        with monkeypatch.context() as patched:
            break_connection(reader.transport, call, error, patched)
            assert reason_of(reader.finish(remote, whole(64))) is reason
        for each in (remote, other):
            assert not reader.transport.is_attached(each)
            assert reason_of(reader.finish(each, whole(64))) is TransferFailureReason.CLOSED
        again = reader.attach(owner.capability)
        assert reader.transport.is_attached(again)
        before = [each.copy() for each in reader.regions]
        assert isinstance(reader.finish(again, whole(64)), TransferDone)
        reader.check(owner.regions, whole(64), before)

    def test_an_unknown_error_of_one_read_does_not_fail_another_read_of_the_peer(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader, _, remote = self.pair()
        other = reader.transport.read(remote, whole(64), TIMEOUT_S)
        with monkeypatch.context() as patched:
            break_connection(reader.transport, "transfer", "nixlBackendError", patched)
            failed = reader.transport.read(remote, whole(64), TIMEOUT_S)
            assert reason_of(reader.transport.poll(failed)) is TransferFailureReason.BROKEN
        assert isinstance(reader.ended(other), TransferDone)
        reader.release(failed)
        reader.release(other)
        assert reader.transport.is_attached(remote)

    @pytest.mark.parametrize("is_alone", [True, False])
    def test_a_broken_connection_is_noticed_by_a_cancelled_read(
        self, is_alone: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The post of a cancelled read is still in flight when the connection breaks."""
        reader, _, remote = self.pair()
        transport = reader.transport
        with monkeypatch.context() as patched:
            agent = transport._reads._agent  # type: ignore[attr-defined]
            patched.setattr(agent, "transfer", lambda handle: "PROC")
            patched.setattr(agent, "check_xfer_state", lambda handle: "PROC")
            reads = [transport.read(remote, whole(64), TIMEOUT_S) for _ in range(1 if is_alone else 2)]
            transport.progress()
            cancelled = reads[-1]
            assert not transport.release(cancelled)
            break_connection(transport, "check_xfer_state", "nixlBackendError", patched)
            transport.progress()
            assert not transport.is_attached(remote)
            for each in reads:
                assert transport.release(each)

    def test_an_error_of_a_cancelled_read_does_not_fail_another_read_of_the_peer(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader, _, remote = self.pair()
        with monkeypatch.context() as patched:
            agent = reader.transport._reads._agent  # type: ignore[attr-defined]
            patched.setattr(agent, "transfer", lambda handle: "PROC")
            patched.setattr(agent, "check_xfer_state", lambda handle: "PROC")
            cancelled = reader.transport.read(remote, whole(64), TIMEOUT_S)
            reader.transport.progress()
            assert not reader.transport.release(cancelled)
            other = reader.transport.read(remote, whole(64), TIMEOUT_S)
            break_connection(reader.transport, "check_xfer_state", "nixlBackendError", patched)
            assert reader.transport.release(cancelled)
        assert isinstance(reader.ended(other), TransferDone)
        reader.release(other)
        assert reader.transport.is_attached(remote)


def break_connection(transport: Transport, call: str, error: str, patched: pytest.MonkeyPatch) -> None:
    """Makes a call of NIXL raise this error."""
    agent = transport._reads._agent  # type: ignore[attr-defined]

    def broken(handle: object) -> str:
        raise type(error, (Exception,), {})("the connection is broken")

    patched.setattr(agent, "transfer", lambda handle: "PROC")
    patched.setattr(agent, call, broken)


class TestNixlProcesses(ProcessConformance):
    """All tests are inherited."""
