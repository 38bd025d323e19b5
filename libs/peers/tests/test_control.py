"""Control connections: who is let in, what arrives, and that no peer holds this process up. Real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from control_pair import TIMEOUT_S, Recorder, Stranger, counted

from hybridkv.peers.control import ControlLoop, LinkId
from hybridkv.peers.control.resolving import MAX_NAMES, Resolver
from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.leases import Lease
from hybridkv.peers.testing.suite import until
from hybridkv.peers.wire import (
    NO_SECRET,
    Channel,
    ClientHandshake,
    CloseReason,
    Describe,
    Done,
    Identity,
    Message,
    Renew,
    Renewed,
    Secret,
    ServerHandshake,
    Session,
    WireLimits,
    frame,
)

SECRET = Secret(b"a secret that both sides know")
WRONG = Secret(b"a secret that nobody knows")
KEPT = WireLimits(handshake_timeout_s=TIMEOUT_S, heartbeat_s=TIMEOUT_S / 3, silence_timeout_s=TIMEOUT_S)
"""Nothing ends by itself on a busy machine."""
CAPABILITY = b"where the memory lies"

MakeLoop = Callable[..., ControlLoop]


@pytest.fixture
def make_loop() -> Iterator[MakeLoop]:
    made = []

    def make(name: str, secret: Secret = SECRET, limits: WireLimits = KEPT) -> ControlLoop:
        made.append(ControlLoop(name, secret, limits))
        return made[-1]

    yield make
    for loop in made:
        assert loop.close(TIMEOUT_S)


def connected(make_loop: MakeLoop, **limits: WireLimits) -> tuple[ControlLoop, Recorder, ControlLoop, Recorder]:
    """(listening, what it hears, connecting, what it hears)"""
    listening, connecting = make_loop("producer", **limits), make_loop("consumer", **limits)
    heard_there, heard_here = Recorder(), Recorder()
    host, port = listening.listen("127.0.0.1", 0, heard_there.handlers)
    connecting.connect(host, port, "producer", heard_here.handlers)
    heard_here.until_open()
    heard_there.until_open()
    return listening, heard_there, connecting, heard_here


def sealed_stranger(address: tuple[str, int]) -> tuple[Stranger, Session]:
    """Somebody who knows the secret and keeps to no other rule."""
    stranger = Stranger(address)
    session = Session(ClientHandshake(Identity("rogue", SECRET.derive(b"control")), Channel.CONTROL, b"n" * 32), KEPT)
    while session.established is None:
        stranger.say(bytes(session.output))
        session.output.clear()
        # No more than the two frames of the handshake: what comes behind them is the test's.
        for _ in range(2):
            size = stranger.hear(4)
            session.feed(size + stranger.hear(int.from_bytes(size, "big")))
            assert session.next() is None
            if session.established is None:
                stranger.say(bytes(session.output))
                session.output.clear()
    return stranger, session


def test_messages_arrive_in_order_and_both_ways(make_loop: MakeLoop) -> None:
    listening, heard_there, connecting, heard_here = connected(make_loop)
    assert heard_there.opened[0][1] == "consumer"
    assert heard_here.opened[0][1] == "producer"
    sent: list[Message] = [Renew(Lease(number, 1)) for number in range(200)]
    for message in sent:
        assert connecting.send(heard_here.opened[0][0], message)
    heard_there.until(lambda: len(heard_there.received) == 200)
    assert heard_there.received == sent
    assert listening.send(heard_there.opened[0][0], Renewed(Lease(1, 1), 3.0))
    heard_here.until(lambda: heard_here.received == [Renewed(Lease(1, 1), 3.0)])


def test_a_bug_of_the_selector_ends_no_loop(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    listening, heard_there, connecting, heard_here = connected(make_loop)
    select, errors = listening._selector.select, [KeyError("a bug"), OSError(9, "bad file")]

    def fail_first(timeout: float | None = None) -> object:
        if errors:
            raise errors.pop()
        return select(timeout)

    monkeypatch.setattr(listening._selector, "select", fail_first)
    for number in range(1, 4):
        assert connecting.send(heard_here.opened[0][0], Renew(Lease(number, 2)))
        heard_there.until(lambda number=number: len(heard_there.received) == number)  # type: ignore[misc]
    assert not errors


def test_a_name_is_looked_up_again_when_there_are_threads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver, found = Resolver(), threading.Event()

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for _ in range(2 * MAX_NAMES):
            assert not resolver.begin("localhost", 1, lambda address: found.set())
    assert resolver.begin("localhost", 1, lambda address: found.set())
    assert found.wait(TIMEOUT_S)


def test_a_handler_may_answer(make_loop: MakeLoop) -> None:
    listening, connecting = make_loop("producer"), make_loop("consumer")

    def reply(link: LinkId, message: Message) -> None:
        assert isinstance(message, Renew)
        listening.send(link, Renewed(message.lease, 1.0))

    host, port = listening.listen("127.0.0.1", 0, Recorder(reply).handlers)
    heard = Recorder()
    connecting.connect(host, port, None, heard.handlers)
    connecting.send(heard.until_open(), Renew(Lease(4, 2)))
    heard.until(lambda: heard.received == [Renewed(Lease(4, 2), 1.0)])


def test_a_frame_of_megabytes_arrives(make_loop: MakeLoop) -> None:
    _, heard_there, connecting, heard_here = connected(make_loop)
    large = Describe(bytes(range(256)) * 16384, "tcp", b"")
    assert connecting.send(heard_here.opened[0][0], large)
    heard_there.until(lambda: heard_there.received == [large])


def test_a_wrong_secret_is_refused_and_counted_on_both_sides(make_loop: MakeLoop) -> None:
    listening, stranger = make_loop("producer"), make_loop("stranger", WRONG)
    heard_there, heard = Recorder(), Recorder()
    host, port = listening.listen("127.0.0.1", 0, heard_there.handlers)
    stranger.connect(host, port, None, heard.handlers)
    assert heard.until_closed() is CloseReason.SECRET
    counted(listening, CloseReason.SECRET)
    assert heard_there.opened == heard_there.closed == []


def test_a_stranger_receives_no_capability(make_loop: MakeLoop) -> None:
    """All bytes that a listener sends to who has no proof, though its owner describes itself to whoever is let in."""
    listening = make_loop("producer")
    told = Recorder()
    described = Recorder()

    def opened(link: LinkId, name: str) -> None:
        described.handlers.opened(link, name)
        listening.send(link, Describe(b"description", "tcp", CAPABILITY))

    handlers = type(told.handlers)(opened, told.handlers.received, told.handlers.closed)
    address = listening.listen("127.0.0.1", 0, handlers)
    heard = b""
    hello = ClientHandshake(Identity("x", WRONG.derive(b"control")), Channel.CONTROL, b"n" * 32).first
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 100, frame(hello), frame(hello) + frame(b"\x92\xa5proof\xc4\x00")):
        stranger = Stranger(address)
        stranger.say(said)
        stranger.sock.shutdown(1)
        heard += stranger.hear_all()
        stranger.close()
    assert b"producer" in heard
    assert CAPABILITY not in heard
    assert b"description" not in heard
    assert described.opened == []
    # The same bytes do go to who proves the secret, or this test would show nothing.
    friend, session = sealed_stranger(address)
    while (body := session.next()) is None:
        session.feed(friend.sock.recv(65536))
    assert CAPABILITY in body
    friend.close()


def test_what_a_stranger_says_ends_its_connection_alone(make_loop: MakeLoop) -> None:
    listening, heard_there, connecting, heard_here = connected(make_loop)
    other = Recorder()
    address = listening.listen("127.0.0.1", 0, other.handlers)
    for data, reason in [
        (b"\xff\xff\xff\xff", CloseReason.OVERSIZED),
        (frame(b"\xc1"), CloseReason.MALFORMED),
        (frame(b"\x92\xa5proof\xc4\x00"), CloseReason.UNEXPECTED),
        (b"\x00\x00", CloseReason.TRUNCATED),
    ]:
        stranger = Stranger(address)
        stranger.say(data)
        stranger.sock.shutdown(1)
        stranger.hear_all()
        stranger.close()
        counted(listening, reason)
    assert connecting.send(heard_here.opened[0][0], Done(Lease(1, 2), True))
    heard_there.until(lambda: heard_there.received == [Done(Lease(1, 2), True)])


@pytest.mark.parametrize("reason", [CloseReason.SEAL, CloseReason.OVERSIZED, CloseReason.MALFORMED])
def test_rubbish_from_who_knows_the_secret_ends_its_connection(make_loop: MakeLoop, reason: CloseReason) -> None:
    listening, heard = make_loop("producer"), Recorder()
    stranger, session = sealed_stranger(listening.listen("127.0.0.1", 0, heard.handlers))
    heard.until_open()
    if reason is CloseReason.SEAL:
        stranger.say(frame(b"x" * 64))
    elif reason is CloseReason.OVERSIZED:
        stranger.say((KEPT.max_frame_bytes + 1).to_bytes(4, "big"))
    else:
        assert session.seal(b"\xc1")
        stranger.say(bytes(session.output))
    assert heard.until_closed() is reason
    assert heard.received == []
    stranger.close()


def test_a_frame_that_is_said_twice_is_heard_once(make_loop: MakeLoop) -> None:
    listening, heard = make_loop("producer"), Recorder()
    stranger, session = sealed_stranger(listening.listen("127.0.0.1", 0, heard.handlers))
    assert session.seal(b"\x91\xa8accepted")
    stranger.say(bytes(session.output) * 2)
    assert heard.until_closed() is CloseReason.SEAL
    assert len(heard.received) == 1
    stranger.close()


def test_an_exception_in_a_handler_ends_that_connection_alone(make_loop: MakeLoop) -> None:
    listening, connecting = make_loop("producer"), make_loop("consumer")

    def fail(link: LinkId, message: Message) -> None:
        raise KeyError("a bug")

    failing, fine, heard, heard_fine = Recorder(fail), Recorder(), Recorder(), Recorder()
    bad = listening.listen("127.0.0.1", 0, failing.handlers)
    good = listening.listen("127.0.0.1", 0, fine.handlers)
    connecting.connect(*bad, None, heard.handlers)
    connecting.connect(*good, None, heard_fine.handlers)
    connecting.send(heard.until_open(), Renew(Lease(1, 1)))
    assert failing.until_closed() is CloseReason.HANDLER
    connecting.send(heard_fine.until_open(), Renew(Lease(1, 1)))
    fine.until(lambda: len(fine.received) == 1)


def test_a_peer_that_says_nothing_is_left(make_loop: MakeLoop) -> None:
    limits = WireLimits(heartbeat_s=0.05, silence_timeout_s=0.2, handshake_timeout_s=TIMEOUT_S)
    listening, heard = make_loop("producer", limits=limits), Recorder()
    stranger, _ = sealed_stranger(listening.listen("127.0.0.1", 0, heard.handlers))
    assert heard.until_closed() is CloseReason.SILENT
    stranger.close()


def test_pings_keep_a_connection(make_loop: MakeLoop) -> None:
    limits = WireLimits(heartbeat_s=0.05, silence_timeout_s=TIMEOUT_S, handshake_timeout_s=TIMEOUT_S)
    listening, heard_there, connecting, heard_here = connected(make_loop, limits=limits)
    until(lambda: min(loop.counts().received_frames for loop in (listening, connecting)) >= 3)
    assert heard_there.received == heard_here.received == []
    assert heard_there.closed == heard_here.closed == []


def test_a_peer_that_reads_nothing_is_left(make_loop: MakeLoop) -> None:
    limits = msgspec.structs.replace(KEPT, max_frame_bytes=1 << 20, max_buffered_bytes=2 << 20)
    listening, heard = make_loop("producer", limits=limits), Recorder()
    stranger, _ = sealed_stranger(listening.listen("127.0.0.1", 0, heard.handlers))
    link = heard.until_open()
    large = Describe(bytes(1 << 19), "tcp", b"")
    while not heard.closed:
        listening.send(link, large)
    assert heard.until_closed() is CloseReason.BACKLOG
    assert not listening.send(link, large)
    stranger.close()


def test_a_handshake_has_its_time(make_loop: MakeLoop) -> None:
    limits = WireLimits(handshake_timeout_s=0.1)
    listening = make_loop("producer", limits=limits)
    stranger = Stranger(listening.listen("127.0.0.1", 0, Recorder().handlers))
    stranger.say(b"\0")
    assert stranger.hear_all() == b""
    counted(listening, CloseReason.TOO_SLOW)
    stranger.close()


def test_a_server_that_does_not_answer_is_given_up(make_loop: MakeLoop) -> None:
    import socket

    connecting, heard = make_loop("consumer", limits=WireLimits(handshake_timeout_s=0.1)), Recorder()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connecting.connect(*silent.getsockname(), None, heard.handlers)
        assert heard.until_closed() is CloseReason.TOO_SLOW


def test_strangers_do_not_keep_a_peer_out(make_loop: MakeLoop) -> None:
    limits = msgspec.structs.replace(KEPT, max_handshakes=4)
    listening, heard_there = make_loop("producer", limits=limits), Recorder()
    address = listening.listen("127.0.0.1", 0, heard_there.handlers)
    strangers = [Stranger(address) for _ in range(12)]
    connecting, heard = make_loop("consumer"), Recorder()
    connecting.connect(*address, "producer", heard.handlers)
    heard.until_open()
    counted(listening, CloseReason.TOO_MANY, 8)
    for stranger in strangers:
        stranger.close()


def test_more_connections_than_allowed_are_refused(make_loop: MakeLoop) -> None:
    limits = msgspec.structs.replace(KEPT, max_connections=2)
    listening, heard = make_loop("producer", limits=limits), Recorder()
    address = listening.listen("127.0.0.1", 0, heard.handlers)
    friends = [sealed_stranger(address)[0] for _ in range(2)]
    heard.until(lambda: len(heard.opened) == 2)
    third = Stranger(address)
    assert third.hear_all() == b""
    counted(listening, CloseReason.TOO_MANY)
    for each in (*friends, third):
        each.close()


def test_nobody_there_is_said(make_loop: MakeLoop) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    for host, port in [address, ("127.0.0.1", 1), ("no.such.host.invalid", 80)]:
        heard = Recorder()
        make_loop("consumer").connect(host, port, None, heard.handlers)
        assert heard.until_closed() is CloseReason.UNREACHABLE


def test_without_a_secret_nobody_else_is_connected_to(make_loop: MakeLoop) -> None:
    heard = Recorder()
    make_loop("consumer", NO_SECRET).connect("192.0.2.1", 80, None, heard.handlers)
    assert heard.until_closed() is CloseReason.NO_SECRET


def test_without_a_secret_peers_of_this_host_talk(make_loop: MakeLoop) -> None:
    listening, connecting, heard = make_loop("producer", NO_SECRET), make_loop("consumer", NO_SECRET), Recorder()
    connecting.connect(*listening.listen("127.0.0.1", 0, Recorder().handlers), "producer", heard.handlers)
    heard.until_open()


def test_somebody_else_at_the_address_is_refused(make_loop: MakeLoop) -> None:
    listening, connecting, heard = make_loop("somebody"), make_loop("consumer"), Recorder()
    connecting.connect(*listening.listen("127.0.0.1", 0, Recorder().handlers), "producer", heard.handlers)
    assert heard.until_closed() is CloseReason.WRONG_PEER


def test_an_end_is_heard_on_the_other_side(make_loop: MakeLoop) -> None:
    _, heard_there, connecting, heard_here = connected(make_loop)
    connecting.end(heard_here.opened[0][0])
    assert heard_here.until_closed() is CloseReason.DONE
    assert heard_there.until_closed() is CloseReason.ENDED
    assert not connecting.send(heard_here.opened[0][0], Renew(Lease(1, 1)))
    assert connecting.counts().refused_sends == 1


def test_a_close_sends_what_waits_and_tells_everybody(make_loop: MakeLoop) -> None:
    _, heard_there, connecting, heard_here = connected(make_loop)
    for number in range(50):
        connecting.send(heard_here.opened[0][0], Done(Lease(number, 1), True))
    assert connecting.close(TIMEOUT_S)
    assert heard_here.until_closed() is CloseReason.DONE
    heard_there.until(lambda: len(heard_there.received) == 50)
    assert connecting.close(TIMEOUT_S)
    with pytest.raises(PeersProtocolError):
        connecting.connect("127.0.0.1", 1, None, heard_here.handlers)


def test_a_close_with_a_peer_that_reads_nothing_ends(make_loop: MakeLoop) -> None:
    listening, heard = make_loop("producer"), Recorder()
    stranger, _ = sealed_stranger(listening.listen("127.0.0.1", 0, heard.handlers))
    link = heard.until_open()
    for _ in range(3):
        listening.send(link, Describe(bytes(7 << 20), "tcp", b""))
    assert listening.close(5.0)
    stranger.close()


def test_a_server_side_says_nothing_before_it_was_spoken_to() -> None:
    session = Session(ServerHandshake(Identity("x", b"k"), Channel.CONTROL, b"n" * 32), KEPT)
    assert session.output == b""
