"""Control connections under those who mean no good, or are broken: crowds, silent addresses, names that are none."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from control_pair import TIMEOUT_S, Recorder, Stranger, counted

from hybridkv.peers.control import ControlLoop, LinkId
from hybridkv.peers.control.door import stranger_to_close
from hybridkv.peers.leases import Lease
from hybridkv.peers.wire import CloseReason, Message, Renew, Secret, WireError, WireLimits

SECRET = Secret(b"a secret that both sides know")
TIMES = {"handshake_timeout_s": TIMEOUT_S, "heartbeat_s": TIMEOUT_S / 3, "silence_timeout_s": TIMEOUT_S}
"""Nothing ends by itself on a busy machine."""

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


def require_heard(loop: ControlLoop, heard_here: Recorder, heard_there: Recorder) -> None:
    """A link that stands, on which something is said."""
    before = len(heard_there.received)
    assert loop.send(heard_here.until_open(), Renew(Lease(1, 1)))
    heard_there.until(lambda: len(heard_there.received) > before)


@pytest.mark.parametrize(
    ("hosts", "gone"), [("a", 0), ("aab", 0), ("baa", 1), ("abab", 0), ("baba", 0), ("abbab", 1), ("cabb", 2)]
)
def test_the_oldest_of_the_host_that_has_most_gives_way(hosts: str, gone: int) -> None:
    assert stranger_to_close(list(hosts)) == gone


def test_a_crowd_of_one_host_leaves_a_stranger_of_another_its_place(make_loop: MakeLoop) -> None:
    listening = make_loop("producer", max_handshakes=3)
    address = listening.listen("127.0.0.1", 0, Recorder().handlers)
    first = Stranger(address)
    assert first.hear(10)[:1] == b"\xff"
    crowd = [socket.create_connection(address, TIMEOUT_S, ("127.0.0.2", 0)) for _ in range(8)]
    counted(listening, CloseReason.TOO_MANY, 6)
    # Six of the crowd were hung up on; the first stranger, who is the oldest of all, was not.
    first.sock.settimeout(0.05)
    with pytest.raises(TimeoutError):
        first.sock.recv(16)
    for each in (first, *crowd):
        each.close()


def test_an_address_that_does_not_answer_keeps_nobody_from_another(make_loop: MakeLoop) -> None:
    connecting, listening = make_loop("consumer", max_connections=2), make_loop("producer")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given_up = [Recorder() for _ in range(3)]
        for each in given_up:
            connecting.connect(*silent.getsockname(), None, each.handlers)
        there, here = Recorder(), Recorder()
        connecting.connect(*listening.listen("127.0.0.1", 0, there.handlers), "producer", here.handlers)
        require_heard(connecting, here, there)
        assert [each.until_closed() for each in given_up[:2]] == [CloseReason.TOO_MANY] * 2
        assert given_up[2].closed == []
        # One that was proven does not give way.
        again = Recorder()
        connecting.connect(*silent.getsockname(), None, again.handlers)
        connecting.connect(*silent.getsockname(), None, Recorder().handlers)
        assert again.until_closed() is CloseReason.TOO_MANY
        require_heard(connecting, here, there)


@pytest.mark.parametrize("host", ["a\0b", "::1%\0", "x" * 70 + ".invalid", "\ud800", "", "1.2.3.4.5"])
def test_a_name_that_is_none_cannot_be_reached(make_loop: MakeLoop, host: str) -> None:
    connecting, listening = make_loop("consumer"), make_loop("producer")
    heard, there, here = Recorder(), Recorder(), Recorder()
    connecting.connect(host, 1, None, heard.handlers)
    assert heard.until_closed() is CloseReason.UNREACHABLE
    connecting.connect(*listening.listen("127.0.0.1", 0, there.handlers), "producer", here.handlers)
    require_heard(connecting, here, there)


def test_what_a_handler_finds_wrong_is_the_reason(make_loop: MakeLoop, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(link: LinkId, message: Message) -> None:
        raise WireError(CloseReason.MALFORMED, "not what was asked for")

    connecting, there, here = make_loop("consumer"), Recorder(refuse), Recorder()
    connecting.connect(*make_loop("producer").listen("127.0.0.1", 0, there.handlers), "producer", here.handlers)
    connecting.send(here.until_open(), Renew(Lease(1, 1)))
    assert there.until_closed() is CloseReason.MALFORMED
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("method", ["_dispatch", "_decode"])
def test_a_bug_over_one_connection_ends_it_and_no_other(
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
    # It is found when the other side has said something.
    listening.send(there.until_open(), Renew(Lease(1, 1)))
    assert here.until_closed() is CloseReason.HANDLER
    require_heard(connecting, other_here, other_there)


def test_a_command_that_fails_ends_no_connection(make_loop: MakeLoop, caplog: pytest.LogCaptureFixture) -> None:
    listening, connecting, there, here = make_loop("producer"), make_loop("consumer"), Recorder(), Recorder()
    connecting.connect(*listening.listen("127.0.0.1", 0, there.handlers), "producer", here.handlers)
    here.until_open()

    def fail() -> None:
        raise RuntimeError("a bug")

    connecting._commands.post(fail)
    require_heard(connecting, here, there)
    assert "a bug" in caplog.text


def test_a_stranger_is_counted_and_its_owner_hears_nothing(make_loop: MakeLoop) -> None:
    listening, heard = make_loop("producer", max_handshakes=1), Recorder()
    address = listening.listen("127.0.0.1", 0, heard.handlers)
    strangers = [Stranger(address) for _ in range(3)]
    counted(listening, CloseReason.TOO_MANY, 2)
    assert heard.opened == heard.closed == []
    for each in strangers:
        each.close()
