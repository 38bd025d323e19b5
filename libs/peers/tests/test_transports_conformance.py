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
from kits.peers.suite import reason_of, whole  # noqa: E402


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
    def test_a_peer_that_nixl_has_lost_is_read_again_after_a_new_attach(
        self, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NIXL never repairs the connection to a peer once it is broken, even if the peer still runs."""
        reader, owner, remote = self.pair()
        reads = reader.transport._reads  # type: ignore[attr-defined]

        def lost(handle: object) -> str:
            raise type("nixlRemoteDisconnectError", (Exception,), {})("NIXL_ERR_REMOTE_DISCONNECT")

        with monkeypatch.context() as patched:
            patched.setattr(reads._agent, "transfer", lambda handle: "PROC")
            patched.setattr(reads._agent, call, lost)
            assert reason_of(reader.finish(remote, whole(64))) is TransferFailureReason.GONE
        assert reason_of(reader.finish(remote, whole(64))) is TransferFailureReason.CLOSED
        again = reader.attach(owner.capability)
        before = [each.copy() for each in reader.regions]
        assert isinstance(reader.finish(again, whole(64)), TransferDone)
        reader.check(owner.regions, whole(64), before)


class TestNixlProcesses(ProcessConformance):
    """All tests are inherited."""
