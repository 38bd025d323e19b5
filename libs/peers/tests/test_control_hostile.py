"""Control connections with hostile or broken peers: crowds, silent addresses, invalid host names."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from control_pair import TIMEOUT_S, Recorder, Stranger, wait_counted

from hybridkv.peers.control import ControlLoop, LinkId
from hybridkv.peers.control.listener import stranger_to_close
from hybridkv.peers.leases import Lease
from hybridkv.peers.wire import CloseReason, Message, Renew, Secret, WireError, WireLimits

SECRET = Secret(b"a secret that both sides know")
TIMES = {"handshake_timeout_s": TIMEOUT_S, "heartbeat_s": TIMEOUT_S / 3, "silence_timeout_s": TIMEOUT_S}
"""No connection times out on a busy machine."""

MakeLoop = Callable[..., ControlLoop]


@pytest.fixture
def make_loop() -> Iterator[MakeLoop]:
    made = []

    def make(name: str, **limits: int) -> ControlLoop:
        made.append(ControlLoop(name, SECRET, WireLimits(**TIMES, **limits)))
        return made[-1]

    yield make
    for loop in made:
        assert loop.close(TIMEOUT_S)


def require_connected(loop: ControlLoop, heard_here: Recorder, heard_there: Recorder) -> None:
    """Requires that the link is open and delivers a message."""
    before = len(heard_there.received)
    assert loop.send(heard_here.until_open(), Renew(Lease(1, 1)))
    heard_there.until(lambda: len(heard_there.received) > before)


@pytest.mark.parametrize(
    ("hosts", "gone"), [("a", 0), ("aab", 0), ("baa", 1), ("abab", 0), ("baba", 0), ("abbab", 1), ("cabb", 2)]
)
def test_the_oldest_stranger_of_the_most_frequent_host_is_closed(hosts: str, gone: int) -> None:
    assert stranger_to_close(list(hosts)) == gone


def test_a_crowd_of_one_host_does_not_displace_a_stranger_of_another(make_loop: MakeLoop) -> None:
    listening = make_loop("producer", max_handshakes=3)
    address = listening.listen("127.0.0.1", 0, Recorder().handlers)
    first = Stranger(address)
    assert first.hear(10)[:1] == b"\xff"
    crowd = [socket.create_connection(address, TIMEOUT_S, ("127.0.0.2", 0)) for _ in range(8)]
    wait_counted(listening, CloseReason.TOO_MANY, 6)
    # Six of the crowd were closed; the first stranger, the oldest of all, was not.
    first.sock.settimeout(0.05)
    with pytest.raises(TimeoutError):
        first.sock.recv(16)
    for each in (first, *crowd):
        each.close()


def test_an_address_that_does_not_answer_blocks_no_other_connection(make_loop: MakeLoop) -> None:
    connecting, listening = make_loop("consumer", max_connections=2), make_loop("producer")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given_up = [Recorder() for _ in range(3)]
        for each in given_up:
            connecting.connect(*silent.getsockname(), None, each.handlers)
        there, here = Recorder(), Recorder()
        connecting.connect(*listening.listen("127.0.0.1", 0, there.handlers), "producer", here.handlers)
        require_connected(connecting, here, there)
        assert [each.until_closed() for each in given_up[:2]] == [CloseReason.TOO_MANY] * 2
        assert given_up[2].closed == []
        # A proven connection is not closed for a new one.
        again = Recorder()
        connecting.connect(*silent.getsockname(), None, again.handlers)
        connecting.connect(*silent.getsockname(), None, Recorder().handlers)
        assert again.until_closed() is CloseReason.TOO_MANY
        require_connected(connecting, here, there)


@pytest.mark.parametrize("host", ["a\0b", "::1%\0", "x" * 70 + ".invalid", "\ud800", "", "1.2.3.4.5"])
def test_an_invalid_host_name_cannot_be_reached(make_loop: MakeLoop, host: str) -> None:
    connecting, listening = make_loop("consumer"), make_loop("producer")
    heard, there, here = Recorder(), Recorder(), Recorder()
    connecting.connect(host, 1, None, heard.handlers)
    assert heard.until_closed() is CloseReason.UNREACHABLE
    connecting.connect(*listening.listen("127.0.0.1", 0, there.handlers), "producer", here.handlers)
    require_connected(connecting, here, there)


def test_the_error_of_a_handler_is_the_reason_of_the_close(
    make_loop: MakeLoop, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(link: LinkId, message: Message) -> None:
        raise WireError(CloseReason.MALFORMED, "not what was asked for")

    connecting, there, here = make_loop("consumer"), Recorder(refuse), Recorder()
    connecting.connect(*make_loop("producer").listen("127.0.0.1", 0, there.handlers), "producer", here.handlers)
    connecting.send(here.until_open(), Renew(Lease(1, 1)))
    assert there.until_closed() is CloseReason.MALFORMED
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("method", ["_dispatch", "_decode"])
def test_a_bug_in_one_connection_ends_no_other(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    listening, connecting = make_loop("producer"), make_loop("consumer")
    there, here, other_there, other_here = (Recorder() for _ in range(4))
    connecting.connect(*listening.listen("127.0.0.1", 0, there.handlers), "producer", here.handlers)
    connecting.connect(*listening.listen("127.0.0.1", 0, other_there.handlers), "producer", other_here.handlers)
    here.until_open()
    other_here.until_open()
    call, is_broken = getattr(connecting, method), [True]

    def fail_once(*arguments: object) -> object:
        if is_broken:
            is_broken.clear()
            raise RuntimeError("a bug")
        return call(*arguments)

    monkeypatch.setattr(connecting, method, fail_once)
    # The bug shows once the other side has sent a message.
    listening.send(there.until_open(), Renew(Lease(1, 1)))
    assert here.until_closed() is CloseReason.HANDLER
    require_connected(connecting, other_here, other_there)


def test_a_command_that_fails_ends_no_connection(make_loop: MakeLoop, caplog: pytest.LogCaptureFixture) -> None:
    listening, connecting, there, here = make_loop("producer"), make_loop("consumer"), Recorder(), Recorder()
    connecting.connect(*listening.listen("127.0.0.1", 0, there.handlers), "producer", here.handlers)
    here.until_open()

    def fail() -> None:
        raise RuntimeError("a bug")

    connecting._commands.post(fail)
    require_connected(connecting, here, there)
    assert "a bug" in caplog.text


def test_a_stranger_is_counted_without_a_callback(make_loop: MakeLoop) -> None:
    listening, heard = make_loop("producer", max_handshakes=1), Recorder()
    address = listening.listen("127.0.0.1", 0, heard.handlers)
    strangers = [Stranger(address) for _ in range(3)]
    wait_counted(listening, CloseReason.TOO_MANY, 2)
    assert heard.opened == heard.closed == []
    for each in strangers:
        each.close()
