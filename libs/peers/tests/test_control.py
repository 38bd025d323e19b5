"""Control connections over real sockets: who is admitted, which messages arrive, and that no peer blocks this
process."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import patience
import pytest
import zmq
from control_pair import TIMEOUT_S, Recorder, Rogue, Stranger, wait_counted
from zmq.utils.monitor import parse_monitor_message

from hybridkv.peers.control import ControlLoop, LinkId
from hybridkv.peers.control.curve import CurveKeys
from hybridkv.peers.control.dialing import MAX_NAMES, Dialer, Resolver
from hybridkv.peers.control.sockets import Address
from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.leases import Lease
from hybridkv.peers.wire import (
    NO_SECRET,
    PROTOCOL_VERSION,
    Accepted,
    Bye,
    CloseReason,
    Describe,
    Hello,
    LeaseDone,
    Message,
    Renew,
    Renewed,
    Secret,
    WireLimits,
    WireMessage,
)
from kits.peers.suite import until

SECRET = Secret(b"a secret that both sides know")
WRONG = Secret(b"a secret that nobody knows")
KEPT = WireLimits(handshake_timeout_s=TIMEOUT_S, heartbeat_s=TIMEOUT_S / 3, silence_timeout_s=TIMEOUT_S)
"""No connection times out on a busy machine."""
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
    """(listening loop, its recorder, connecting loop, its recorder)"""
    listening, connecting = make_loop("producer", **limits), make_loop("consumer", **limits)
    heard_there, heard_here = Recorder(), Recorder()
    host, port = listening.listen("127.0.0.1", 0, heard_there.handlers)
    connecting.connect(host, port, "producer", heard_here.handlers)
    heard_here.until_open()
    heard_there.until_open()
    return listening, heard_there, connecting, heard_here


@pytest.fixture
def make_rogue() -> Iterator[Callable[..., Rogue]]:
    """Peers that know the secret and obey no other rule. Each has sent its Hello, unless `is_polite` is false."""
    made = []

    def make(address: tuple[str, int], is_polite: bool = True) -> Rogue:
        made.append(Rogue(address, SECRET))
        if is_polite:
            made[-1].greet()
        return made[-1]

    yield make
    for rogue in made:
        rogue.close()


MakeRogue = Callable[..., Rogue]


def test_messages_arrive_in_order_in_both_directions(make_loop: MakeLoop) -> None:
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


def test_an_exception_of_the_poller_does_not_end_the_loop(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    listening, heard_there, connecting, heard_here = connected(make_loop)
    poll, errors = listening._poller.poll, [KeyError("a bug"), OSError(9, "bad file")]

    def fail_first(timeout_ms: float | None) -> object:
        if errors:
            raise errors.pop()
        return poll(timeout_ms)

    monkeypatch.setattr(listening._poller, "poll", fail_first)
    # Messages may arrive in the turn that was already running.
    for number in range(1, 1000):
        assert connecting.send(heard_here.opened[0][0], Renew(Lease(number, 2)))
        heard_there.until(lambda number=number: len(heard_there.received) == number)  # type: ignore[misc]
        if not errors:
            return
    raise AssertionError("the poller was not called")


def test_a_name_is_resolved_again_once_threads_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    found: list[tuple[str, ...]] = []
    resolver = Resolver(ended.put)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for number in range(2 * MAX_NAMES):
            assert resolver.begin(f"name{number}", found.append)
            ended.get_nowait()()
    assert found == [()] * (2 * MAX_NAMES)
    assert resolver.begin("localhost", found.append)
    ended.get(timeout=TIMEOUT_S)()
    assert found[-1]


def test_a_handler_may_reply(make_loop: MakeLoop) -> None:
    listening, connecting = make_loop("producer"), make_loop("consumer")

    def reply(link: LinkId, message: Message) -> None:
        assert isinstance(message, Renew)
        listening.send(link, Renewed(message.lease, 1.0))

    host, port = listening.listen("127.0.0.1", 0, Recorder(reply).handlers)
    heard = Recorder()
    connecting.connect(host, port, None, heard.handlers)
    connecting.send(heard.until_open(), Renew(Lease(4, 2)))
    heard.until(lambda: heard.received == [Renewed(Lease(4, 2), 1.0)])


def test_a_message_of_megabytes_arrives(make_loop: MakeLoop) -> None:
    _, heard_there, connecting, heard_here = connected(make_loop)
    large = Describe(bytes(range(256)) * 16384, b"")
    assert connecting.send(heard_here.opened[0][0], large)
    heard_there.until(lambda: heard_there.received == [large])


def test_a_wrong_secret_is_refused_and_counted_on_both_sides(make_loop: MakeLoop) -> None:
    listening, stranger = make_loop("producer"), make_loop("stranger", WRONG)
    heard_there, heard = Recorder(), Recorder()
    host, port = listening.listen("127.0.0.1", 0, heard_there.handlers)
    stranger.connect(host, port, None, heard.handlers)
    assert heard.until_closed() is CloseReason.HUNG_UP
    wait_counted(listening, CloseReason.SECRET)
    assert heard_there.opened == heard_there.closed == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_connection_that_fails_before_hello_has_the_right_reason(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """On a busy machine the handshake may fail before this side sends Hello."""
    connecting = Dialer._connecting

    def connect_slowly(dialing: Dialer, addresses: tuple[Address, ...], began_s: float) -> object:
        sockets = connecting(dialing, addresses, began_s)
        time.sleep(0.5)
        return sockets

    listening, heard = make_loop("producer", WRONG), Recorder()
    host, port = listening.listen("127.0.0.1", 0, Recorder().handlers)
    if not is_there:
        assert listening.close(TIMEOUT_S)
    monkeypatch.setattr(Dialer, "_connecting", connect_slowly)
    make_loop("consumer").connect(host, port, None, heard.handlers)
    expected = {CloseReason.SECRET, CloseReason.HUNG_UP} if is_there else {CloseReason.UNREACHABLE}
    assert heard.until_closed() in expected


def test_a_stranger_receives_no_capability(make_loop: MakeLoop, make_rogue: MakeRogue) -> None:
    """Checks all bytes that a listener sends to a client without the secret, though it describes itself to admitted
    peers."""
    listening = make_loop("producer")
    described = Recorder()

    def opened(link: LinkId, name: str) -> None:
        described.handlers.opened(link, name)
        listening.send(link, Describe(b"description", CAPABILITY))

    handlers = type(described.handlers)(opened, described.handlers.received, described.handlers.closed)
    address = listening.listen("127.0.0.1", 0, handlers)
    greeting, theirs = (b"\xff" + bytes(7) + byte + b"\x7f\x03\x01CURVE" for byte in (b"\0", b"\1"))
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 100, greeting, greeting.ljust(64, b"\0"), b"\0" * 100):
        stranger = Stranger(address)
        stranger.say(said)
        with contextlib.suppress(OSError):
            stranger.sock.shutdown(1)
        heard = stranger.hear_all()
        stranger.close()
        assert theirs.ljust(64, b"\0").startswith(heard), (said, heard)
    assert described.opened == []
    # Control: a peer with the secret does receive it.
    friend = make_rogue(address)
    assert friend.hear() == Hello(PROTOCOL_VERSION, "producer")
    assert friend.hear() == Describe(b"description", CAPABILITY)


def test_invalid_bytes_of_a_stranger_end_only_its_own_connection(make_loop: MakeLoop) -> None:
    listening, heard_there, connecting, heard_here = connected(make_loop)
    address = listening.listen("127.0.0.1", 0, Recorder().handlers)
    for data, reason in [
        (b"\0" * 64, CloseReason.MALFORMED),
        (b"\xff" * 64, CloseReason.MALFORMED),
        (b"\xff\0", CloseReason.ENDED),
    ]:
        before = listening.counts().closed.get(reason, 0)
        stranger = Stranger(address)
        stranger.say(data)
        with contextlib.suppress(OSError):
            stranger.sock.shutdown(1)
        stranger.hear_all()
        stranger.close()
        wait_counted(listening, reason, before + 1)
    assert connecting.send(heard_here.opened[0][0], LeaseDone(Lease(1, 2), True))
    heard_there.until(lambda: heard_there.received == [LeaseDone(Lease(1, 2), True)])


RUBBISH: list[tuple[CloseReason, WireMessage | bytes]] = [
    (CloseReason.MALFORMED, b"\xc1"),
    (CloseReason.MALFORMED, b""),
    (CloseReason.UNEXPECTED, Hello(PROTOCOL_VERSION, "rogue")),
    (CloseReason.ENDED, Bye("tired")),
    (CloseReason.RESET, bytes(KEPT.max_frame_bytes + 1)),
]


@pytest.mark.parametrize(("reason", "said"), RUBBISH, ids=["bytes", "nothing", "hello", "bye", "oversized"])
def test_an_invalid_message_of_an_admitted_peer_ends_its_connection(
    make_loop: MakeLoop, make_rogue: MakeRogue, reason: CloseReason, said: WireMessage | bytes
) -> None:
    listening, heard = make_loop("producer"), Recorder()
    rogue = make_rogue(listening.listen("127.0.0.1", 0, heard.handlers))
    heard.until_open()
    rogue.say(said, Accepted())
    assert heard.until_closed() is reason
    rogue.until_thrown_out()
    assert heard.received == []


def test_a_message_in_several_parts_is_refused(make_loop: MakeLoop, make_rogue: MakeRogue) -> None:
    listening, heard = make_loop("producer"), Recorder()
    rogue = make_rogue(listening.listen("127.0.0.1", 0, heard.handlers))
    heard.until_open()
    rogue.say(Accepted(), more=True)
    rogue.say(Accepted())
    assert heard.until_closed() is CloseReason.MALFORMED
    rogue.until_thrown_out()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(1, "rogue"), CloseReason.VERSION),
        (Hello(PROTOCOL_VERSION + 1, "rogue"), CloseReason.VERSION),
        (Hello(PROTOCOL_VERSION, "producer"), CloseReason.SELF),
        (Hello(PROTOCOL_VERSION, ""), CloseReason.OVERSIZED),
        (Hello(PROTOCOL_VERSION, "x" * 129), CloseReason.OVERSIZED),
        (Accepted(), CloseReason.UNEXPECTED),
        (b"\xc1", CloseReason.MALFORMED),
    ],
)
def test_a_peer_without_a_valid_hello_is_rejected_without_a_callback(
    make_loop: MakeLoop, make_rogue: MakeRogue, hello: WireMessage | bytes, reason: CloseReason
) -> None:
    listening, heard = make_loop("producer"), Recorder()
    rogue = make_rogue(listening.listen("127.0.0.1", 0, heard.handlers), is_polite=False)
    rogue.say(hello)
    if reason in (CloseReason.VERSION, CloseReason.SELF):
        assert rogue.hear() == Bye(reason.value)
    wait_counted(listening, reason)
    assert heard.opened == heard.closed == []


def test_a_silent_peer_that_proved_the_secret_makes_way_for_another(make_loop: MakeLoop, make_rogue: MakeRogue) -> None:
    listening = make_loop("producer", limits=msgspec.structs.replace(KEPT, max_handshakes=1))
    address = listening.listen("127.0.0.1", 0, Recorder().handlers)
    silent = make_rogue(address, is_polite=False)
    assert silent.monitor.poll(TIMEOUT_S * 1000)
    assert parse_monitor_message(silent.monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    make_rogue(address, is_polite=False)
    silent.until_thrown_out()
    wait_counted(listening, CloseReason.TOO_MANY)


def test_a_client_with_another_key_is_refused_though_it_knows_the_servers_key(make_loop: MakeLoop) -> None:
    listening, heard = make_loop("producer"), Recorder()
    address = listening.listen("127.0.0.1", 0, heard.handlers)
    own, other = CurveKeys.of(SECRET), CurveKeys.of(WRONG)
    keys = {"client_public": other.client_public, "client_secret": other.client_secret}
    rogue = Rogue(address, SECRET, msgspec.structs.replace(own, **keys))
    try:
        rogue.until_thrown_out()
        wait_counted(listening, CloseReason.SECRET)
        assert heard.opened == []
    finally:
        rogue.close()


def test_keys_depend_on_the_secret_alone_and_are_not_printed() -> None:
    assert CurveKeys.of(SECRET) == CurveKeys.of(Secret(b"a secret that both sides know")) != CurveKeys.of(WRONG)
    keys = CurveKeys.of(SECRET)
    assert len({keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}) == 4
    assert keys.server_secret.decode() not in repr(keys)


def test_an_exception_in_a_handler_ends_only_that_connection(make_loop: MakeLoop) -> None:
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


STOPPED = """
import os, signal, sys
from hybridkv.peers.control import ControlLoop, Handlers
from hybridkv.peers.wire import Secret, WireLimits

def stop(link, name):
    os.kill(os.getpid(), signal.SIGSTOP)

loop = ControlLoop("stopped", Secret(b"a secret that both sides know"), WireLimits())
loop.connect("127.0.0.1", int(sys.argv[1]), None, Handlers(stop, print, print))
signal.pause()
"""


def test_a_stopped_peer_is_disconnected(make_loop: MakeLoop) -> None:
    limits = WireLimits(heartbeat_s=0.05, silence_timeout_s=patience.seconds(0.1), handshake_timeout_s=TIMEOUT_S)
    listening, heard = make_loop("producer", limits=limits), Recorder()
    _, port = listening.listen("127.0.0.1", 0, heard.handlers)
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    with subprocess.Popen([sys.executable, "-c", STOPPED, str(port)], env=path) as process:
        try:
            assert heard.until_closed() is CloseReason.RESET
            assert process.poll() is None
        finally:
            process.kill()


def test_heartbeats_keep_an_idle_connection_open(make_loop: MakeLoop) -> None:
    limits = msgspec.structs.replace(KEPT, heartbeat_s=0.05, silence_timeout_s=patience.seconds(0.1))
    _, heard_there, connecting, heard_here = connected(make_loop, limits=limits)
    time.sleep(3 * limits.silence_timeout_s)
    assert connecting.send(heard_here.opened[0][0], Accepted())
    heard_there.until(lambda: heard_there.received == [Accepted()])
    assert heard_there.closed == heard_here.closed == []


def test_a_peer_that_reads_nothing_is_disconnected(make_loop: MakeLoop, make_rogue: MakeRogue) -> None:
    limits = msgspec.structs.replace(KEPT, max_queued=4)
    listening, heard = make_loop("producer", limits=limits), Recorder()
    rogue = make_rogue(listening.listen("127.0.0.1", 0, heard.handlers))
    link = heard.until_open()
    large = Describe(bytes(1 << 22), b"")
    until(lambda: not listening.send(link, large))
    assert heard.until_closed() is CloseReason.BACKLOG
    assert not listening.send(link, large)
    rogue.until_thrown_out()


def test_a_peer_that_reads_may_receive_any_number_of_messages(make_loop: MakeLoop) -> None:
    limits = msgspec.structs.replace(KEPT, max_queued=4)
    _, heard_there, connecting, heard_here = connected(make_loop, limits=limits)
    for number in range(1, 20):
        assert connecting.send(heard_here.opened[0][0], Describe(bytes(1 << 19), b""))
        heard_there.until(lambda number=number: len(heard_there.received) == number)  # type: ignore[misc]


def test_a_handshake_has_a_time_limit(make_loop: MakeLoop) -> None:
    limits = WireLimits(handshake_timeout_s=0.1)
    listening = make_loop("producer", limits=limits)
    stranger = Stranger(listening.listen("127.0.0.1", 0, Recorder().handlers))
    stranger.say(b"\xff")
    stranger.hear_all()
    wait_counted(listening, CloseReason.TOO_SLOW)
    stranger.close()


def test_a_server_that_does_not_answer_is_given_up(make_loop: MakeLoop) -> None:
    import socket

    limits = WireLimits(handshake_timeout_s=patience.seconds(0.1))
    connecting, heard = make_loop("consumer", limits=limits), Recorder()
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
    wait_counted(listening, CloseReason.TOO_MANY, 8)
    for stranger in strangers:
        stranger.close()


def test_more_connections_than_allowed_are_refused(make_loop: MakeLoop, make_rogue: MakeRogue) -> None:
    limits = msgspec.structs.replace(KEPT, max_connections=2)
    listening, heard = make_loop("producer", limits=limits), Recorder()
    address = listening.listen("127.0.0.1", 0, heard.handlers)
    for _ in range(2):
        make_rogue(address)
    heard.until(lambda: len(heard.opened) == 2)
    third = make_rogue(address)
    assert third.hear() == Bye(CloseReason.TOO_MANY.value)
    wait_counted(listening, CloseReason.TOO_MANY)
    assert heard.closed == []


def test_the_connection_that_is_silent_longest_makes_room_for_a_new_one(make_loop: MakeLoop) -> None:
    limits = msgspec.structs.replace(KEPT, max_connections=2)
    listening, heard_there = make_loop("producer", limits=limits), Recorder()
    address = listening.listen("127.0.0.1", 0, heard_there.handlers, idle_s=0.0)
    loops = [make_loop(f"consumer{number}") for number in range(4)]
    here = [Recorder() for _ in loops]

    def connect(number: int) -> LinkId:
        loops[number].connect(*address, "producer", here[number].handlers)
        here[number].until(lambda: bool(here[number].opened or here[number].closed))
        assert here[number].closed == []
        return here[number].opened[0][0]

    links = [connect(0), connect(1)]
    assert loops[0].send(links[0], Renew(Lease(1, 1)))
    heard_there.until(lambda: heard_there.received == [Renew(Lease(1, 1))])
    connect(2)
    assert here[1].until_closed() is CloseReason.ENDED
    connect(3)
    assert here[0].until_closed() is CloseReason.ENDED
    heard_there.until(lambda: len(heard_there.opened) == 4)
    assert [name for _, name in heard_there.opened] == ["consumer0", "consumer1", "consumer2", "consumer3"]
    heard_there.until(lambda: len(heard_there.closed) == 2)
    assert {reason for _, reason in heard_there.closed} == {CloseReason.TOO_MANY}
    assert here[2].closed == here[3].closed == []


def test_a_connection_that_is_not_idle_makes_no_room(make_loop: MakeLoop) -> None:
    now_s = [0.0]
    limits = msgspec.structs.replace(KEPT, max_connections=1)
    listening, heard_there, first, second = (
        ControlLoop("producer", SECRET, limits, lambda: now_s[0]),
        *(Recorder() for _ in range(3)),
    )
    try:
        address = listening.listen("127.0.0.1", 0, heard_there.handlers, idle_s=10.0)
        make_loop("first").connect(*address, "producer", first.handlers)
        first.until_open()
        now_s[0] = 9.0
        make_loop("second").connect(*address, "producer", second.handlers)
        assert second.until_closed() is CloseReason.TOO_MANY
        now_s[0] = 10.0
        make_loop("third").connect(*address, "producer", second.handlers)
        second.until_open()
        assert first.until_closed() is CloseReason.ENDED
    finally:
        assert listening.close(TIMEOUT_S)


def test_an_unreachable_peer_is_reported(make_loop: MakeLoop) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    for host, port in [address, ("127.0.0.1", 1), ("no.such.host.invalid", 80)]:
        heard = Recorder()
        make_loop("consumer").connect(host, port, None, heard.handlers)
        assert heard.until_closed() is CloseReason.UNREACHABLE


def test_a_loop_without_a_secret_connects_to_no_other_host(make_loop: MakeLoop) -> None:
    heard = Recorder()
    make_loop("consumer", NO_SECRET).connect("192.0.2.1", 80, None, heard.handlers)
    assert heard.until_closed() is CloseReason.NO_SECRET


def test_peers_of_one_host_connect_without_a_secret(make_loop: MakeLoop) -> None:
    listening, connecting, heard = make_loop("producer", NO_SECRET), make_loop("consumer", NO_SECRET), Recorder()
    connecting.connect(*listening.listen("127.0.0.1", 0, Recorder().handlers), "producer", heard.handlers)
    heard.until_open()


def test_another_peer_at_the_address_is_refused(make_loop: MakeLoop) -> None:
    listening, connecting, heard = make_loop("somebody"), make_loop("consumer"), Recorder()
    connecting.connect(*listening.listen("127.0.0.1", 0, Recorder().handlers), "producer", heard.handlers)
    assert heard.until_closed() is CloseReason.WRONG_PEER


def test_the_other_side_is_notified_of_an_end(make_loop: MakeLoop) -> None:
    _, heard_there, connecting, heard_here = connected(make_loop)
    connecting.end(heard_here.opened[0][0])
    assert heard_here.until_closed() is CloseReason.DONE
    assert heard_there.until_closed() is CloseReason.ENDED
    assert not connecting.send(heard_here.opened[0][0], Renew(Lease(1, 1)))


def test_a_close_sends_queued_messages_and_ends_all_connections(make_loop: MakeLoop) -> None:
    _, heard_there, connecting, heard_here = connected(make_loop)
    for number in range(50):
        connecting.send(heard_here.opened[0][0], LeaseDone(Lease(number, 1), True))
    assert connecting.close(TIMEOUT_S)
    assert heard_here.until_closed() is CloseReason.DONE
    heard_there.until(lambda: len(heard_there.received) == 50)
    assert connecting.close(TIMEOUT_S)
    with pytest.raises(PeersProtocolError):
        connecting.connect("127.0.0.1", 1, None, heard_here.handlers)


def test_a_close_ends_despite_a_peer_that_reads_nothing(make_loop: MakeLoop, make_rogue: MakeRogue) -> None:
    listening, heard = make_loop("producer"), Recorder()
    make_rogue(listening.listen("127.0.0.1", 0, heard.handlers))
    link = heard.until_open()
    for _ in range(3):
        listening.send(link, Describe(bytes(7 << 20), b""))
    assert listening.close(2.0) or listening.close(patience.seconds(0.5))


def test_a_killed_peer_is_noticed_at_once(make_loop: MakeLoop, make_rogue: MakeRogue) -> None:
    listening, heard = make_loop("producer"), Recorder()
    rogue = make_rogue(listening.listen("127.0.0.1", 0, heard.handlers))
    heard.until_open()
    rogue.close()
    assert heard.until_closed() is CloseReason.RESET
