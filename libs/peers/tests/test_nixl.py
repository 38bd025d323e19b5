"""NIXL alone: ranges of gigabytes, options, and the error where it is not installed."""

from __future__ import annotations

import sys

import patience
import pytest
from large_memory import PIECE_BYTES, LargeMemory

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport import Region, TransferDone, TransferFailed
from hybridkv.peers.transport.nixl import NixlTransport
from hybridkv.peers.transport.nixl_library import MODULES
from kits.peers.factories import fresh_name
from kits.peers.memory import pattern
from kits.peers.suite import TIMEOUT_S, reason_of, whole


def test_the_error_without_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"{name}._api", raising=False)
    with pytest.raises(PeersConfigurationError) as caught:
        NixlTransport("name")
    assert caught.value.field == "nixl" and "pip install" in caught.value.hint


@pytest.mark.full
def test_a_range_of_more_than_two_gibibytes_is_read() -> None:
    pieces = (2 << 30) // PIECE_BYTES + 1
    source, target = LargeMemory(pieces), LargeMemory(pieces)
    owner, reader = NixlTransport(fresh_name()), NixlTransport(fresh_name())
    try:
        source.piece[:] = pattern(0, PIECE_BYTES).tobytes()
        capability = owner.register([Region(source.address, source.num_bytes)])
        reader.register([Region(target.address, target.num_bytes)])
        remote = reader.attach(capability)
        assert not isinstance(remote, TransferFailed), remote
        transfer = reader.read(remote, whole(source.num_bytes), patience.seconds(60.0))
        while not isinstance(state := reader.poll(transfer), TransferDone):
            assert reason_of(state) is None, state
            owner.progress()
            reader.wait(0.001)
        assert state.num_bytes == source.num_bytes > 1 << 31
        assert target.piece == source.piece
    finally:
        assert reader.close(TIMEOUT_S)
        assert owner.close(TIMEOUT_S)
        source.close()
        target.close()
