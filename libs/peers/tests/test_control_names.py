"""Control connections by host name: several addresses of one name, and lookups that take long."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import patience
import pytest
import zmq
from control_pair import TIMEOUT_S, Recorder

from hybridkv.peers.control import ControlLoop, LinkId
from hybridkv.peers.control.curve import CurveKeys
from hybridkv.peers.control.dialing import MAX_ADDRESSES, MAX_NAMES, Dialer, DialTarget
from hybridkv.peers.control.sockets import ControlConnection, ControlSettings, stop_monitor
from hybridkv.peers.wire import CloseReason, Secret, WireLimits
from kits.peers.suite import until

SECRET = Secret(b"a secret that both sides know")
KEPT = WireLimits(handshake_timeout_s=TIMEOUT_S, heartbeat_s=TIMEOUT_S / 3, silence_timeout_s=TIMEOUT_S)
"""No connection times out on a busy machine."""

Lookup = Callable[[str], Sequence[str]]
"""Addresses of a name. Raises `OSError` if the name is unknown."""


@pytest.fixture
def make_loop() -> Iterator[Callable[..., ControlLoop]]:
    made = []

    def make(name: str, limits: WireLimits = KEPT, clock: Callable[[], float] = time.monotonic) -> ControlLoop:
        made.append(ControlLoop(name, SECRET, limits, clock))
        return made[-1]

    yield make
    for loop in made:
        assert loop.close(TIMEOUT_S)


MakeLoop = Callable[..., ControlLoop]


@pytest.fixture
def set_names(monkeypatch: pytest.MonkeyPatch) -> Callable[[Lookup], None]:
    """Replaces the lookup of names by the system. Numeric addresses need no lookup."""
    real = socket.getaddrinfo

    def set_lookup(lookup: Lookup) -> None:
        def find(host: str, port: int | None, *more: Any, **named: Any) -> list[Any]:
            if host[-1:].isdigit() or named.get("flags", 0) & socket.AI_NUMERICHOST:
                return real(host, port, *more, **named)
            return [each for address in lookup(host) for each in real(address, port, *more, **named)]

        monkeypatch.setattr(socket, "getaddrinfo", find)

    return set_lookup


SetNames = Callable[[Lookup], None]


def require_open(heard: Recorder) -> None:
    """Waits for the end of the attempt. Requires that the connection is open, and that nothing else was reported."""
    heard.until(lambda: bool(heard.opened or heard.closed))
    assert (len(heard.opened), heard.closed) == (1, [])


def free_port() -> int:
    """Port that is free at several addresses. Below the ports that the system gives to connections."""
    for port in range(21_000, 32_000):
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            for address in ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"):
                opened.enter_context(socket.create_server((address, port)))
            return port
    raise RuntimeError("no port is free")


@pytest.mark.parametrize("first", [["::1"], ["127.0.0.2"], ["127.0.0.2", "::1", "127.0.0.3"]])
def test_each_address_of_a_name_is_tried(make_loop: MakeLoop, set_names: SetNames, first: list[str]) -> None:
    """A name has an address of IPv6 and one of IPv4, and the peer listens at one of them."""
    set_names(lambda host: [*first, "127.0.0.1"])
    there, here = Recorder(), Recorder()
    _, port = make_loop("producer").listen("127.0.0.1", 0, there.handlers)
    make_loop("consumer").connect("name.example", port, "producer", here.handlers)
    require_open(here)
    there.until_open()


def test_an_address_with_another_service_keeps_no_peer_out(make_loop: MakeLoop, set_names: SetNames) -> None:
    set_names(lambda host: ["127.0.0.2", "127.0.0.1"])
    here = Recorder()
    _, port = make_loop("producer").listen("127.0.0.1", free_port(), Recorder().handlers)
    with socket.create_server(("127.0.0.2", port)) as other:
        make_loop("consumer").connect("name.example", port, "producer", here.handlers)
        other.settimeout(TIMEOUT_S)
        other.accept()[0].close()
        require_open(here)


@pytest.mark.parametrize("is_full", [True, False])
def test_an_address_that_does_not_answer_is_given_up(make_loop: MakeLoop, set_names: SetNames, is_full: bool) -> None:
    """The loop's clock stands still, so only libzmq's timers run."""
    set_names(lambda host: ["127.0.0.2", "127.0.0.1"])
    here, limits = Recorder(), WireLimits(handshake_timeout_s=patience.seconds(0.2))
    _, port = make_loop("producer").listen("127.0.0.1", free_port(), Recorder().handlers)
    with socket.create_server(("127.0.0.2", port), backlog=0 if is_full else None) as silent:
        # The system drops further packets once the queue of the listener is full.
        waiting = [socket.socket() for _ in range(4 if is_full else 0)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(silent.getsockname())
        make_loop("consumer", limits, lambda: 0.0).connect("name.example", port, "producer", here.handlers)
        require_open(here)
        for each in waiting:
            each.close()


def test_the_addresses_of_a_name_share_the_time_that_is_left() -> None:
    now_s, dialed = [0.0], list[ControlConnection]()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    settings = ControlSettings(context, CurveKeys.of(SECRET), WireLimits(handshake_timeout_s=60.0), lambda: now_s[0])
    unused: Callable[..., None] = lambda *values, **named: None  # noqa: E731
    dialer = Dialer(settings, list, dialed.append, unused, unused, unused)
    target = DialTarget("name.example", 1, None, Recorder().handlers)
    dialer._waiting[LinkId(1)] = (target, 0.0)
    try:
        dialer._dial(LinkId(1), ("127.0.0.2", "127.0.0.3", "127.0.0.4"))
        for spent_s in (20.0, 50.0):
            now_s[0] = spent_s
            assert dialer.dial_next(dialed[-1])
        assert not dialer.dial_next(dialed[-1])
        assert [each.socket.connect_timeout for each in dialed] == [20_000, 20_000, 10_000]
        assert [each.socket.handshake_ivl for each in dialed] == [20_000, 20_000, 10_000]
    finally:
        for each in dialed:
            assert each.monitor is not None
            stop_monitor(each.socket, each.monitor)
        context.destroy(linger=0)


def test_late_closed_sockets_of_earlier_addresses_keep_no_peer_out(make_loop: MakeLoop, set_names: SetNames) -> None:
    """libzmq frees closed sockets on a thread of its own, some time after the close."""
    set_names(lambda host: ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.1"])
    limits = msgspec.structs.replace(KEPT, max_connections=160, max_handshakes=160)
    here = [Recorder() for _ in range(limits.max_connections)]
    _, port = make_loop("producer", limits).listen("127.0.0.1", free_port(), Recorder().handlers)
    consumer = make_loop("consumer", limits)
    for heard in here:
        consumer.connect("name.example", port, "producer", heard.handlers)
    for heard in here:
        require_open(heard)


def test_a_name_without_a_peer_ends_once_and_unreachable_hides_no_other_reason(
    make_loop: MakeLoop, set_names: SetNames
) -> None:
    addresses = ["127.0.0.2", "127.0.0.3"]
    set_names(lambda host: addresses)
    consumer, heard = make_loop("consumer"), Recorder()
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        consumer.connect("name.example", port, "producer", heard.handlers)
        other.settimeout(TIMEOUT_S)
        other.accept()[0].close()
        assert heard.until_closed() in (CloseReason.HUNG_UP, CloseReason.RESET)
    consumer.connect("name.example", port, "producer", heard.handlers)
    heard.until(lambda: len(heard.closed) == 2)
    assert heard.closed[1][1] is CloseReason.UNREACHABLE
    assert sum(consumer.counts().closed.values()) == 2 and heard.opened == []


def test_a_peer_that_answers_ends_the_search(make_loop: MakeLoop, set_names: SetNames) -> None:
    """An engine that finds itself does not look for another engine at the other addresses of its name."""
    set_names(lambda host: ["127.0.0.1", "127.0.0.2"])
    heard, there = Recorder(), Recorder()
    consumer = make_loop("consumer")
    _, port = consumer.listen("127.0.0.1", free_port(), there.handlers)
    make_loop("producer").listen("127.0.0.2", port, there.handlers)
    consumer.connect("name.example", port, None, heard.handlers)
    heard.until(lambda: bool(heard.opened or heard.closed))
    assert [reason for _, reason in heard.closed] == [CloseReason.SELF]


@pytest.mark.parametrize("first", ["other", "consumer"])
def test_another_peer_does_not_end_the_search_for_an_expected_one(
    make_loop: MakeLoop, set_names: SetNames, first: str
) -> None:
    """A name of several engines, such as a headless service. The consumer may be one of them."""
    addresses = ["127.0.0.2", "127.0.0.1"]
    set_names(lambda host: addresses)
    here, there = Recorder(), Recorder()
    _, port = make_loop("producer").listen("127.0.0.1", free_port(), there.handlers)
    consumer = make_loop("consumer")
    (consumer if first == "consumer" else make_loop(first)).listen("127.0.0.2", port, Recorder().handlers)
    consumer.connect("name.example", port, "producer", here.handlers)
    require_open(here)
    there.until_open()
    # If the expected peer is at none of them, the other peer is the reason.
    addresses[1] = "127.0.0.3"
    missed = Recorder()
    consumer.connect("name.example", port, "producer", missed.handlers)
    expected = CloseReason.SELF if first == "consumer" else CloseReason.WRONG_PEER
    assert missed.until_closed() is expected and missed.opened == []


def test_a_name_has_a_limit_of_addresses(make_loop: MakeLoop, set_names: SetNames) -> None:
    set_names(lambda host: [f"127.0.0.{number}" for number in range(MAX_ADDRESSES + 1, 0, -1)])
    heard = Recorder()
    _, port = make_loop("producer").listen("127.0.0.1", 0, Recorder().handlers)
    make_loop("consumer").connect("name.example", port, "producer", heard.handlers)
    assert heard.until_closed() is CloseReason.UNREACHABLE


class SlowNames:
    """Lookups that end when `answer` is set."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.begun: Counter[str] = Counter()
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()

    def __call__(self, host: str) -> Sequence[str]:
        with self._lock:
            self.begun[host] += 1
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        self.answer.wait(TIMEOUT_S)
        with self._lock:
            self._now -= 1
        return ["127.0.0.1"]


@pytest.fixture
def slow_names(set_names: SetNames) -> Iterator[SlowNames]:
    names = SlowNames()
    set_names(names)
    yield names
    names.answer.set()


def test_more_names_than_lookups_wait_for_their_turn(make_loop: MakeLoop, slow_names: SlowNames) -> None:
    there, here = Recorder(), [Recorder() for _ in range(3 * MAX_NAMES)]
    consumer = make_loop("consumer")
    _, port = make_loop("producer").listen("127.0.0.1", 0, there.handlers)
    for number, heard in enumerate(here):
        consumer.connect(f"name{number}.example", port, "producer", heard.handlers)
    until(lambda: len(consumer._dialer) == len(here) and len(slow_names.begun) == MAX_NAMES, TIMEOUT_S)
    slow_names.answer.set()
    for heard in here:
        require_open(heard)
    assert slow_names.most_at_once == MAX_NAMES


def test_connections_to_one_name_share_a_lookup(make_loop: MakeLoop, slow_names: SlowNames) -> None:
    """The ranks of one producer have one name."""
    there, here = Recorder(), [Recorder() for _ in range(2 * MAX_NAMES)]
    consumer = make_loop("consumer")
    _, port = make_loop("producer").listen("127.0.0.1", 0, there.handlers)
    for heard in here:
        consumer.connect("name.example", port, "producer", heard.handlers)
    until(lambda: len(consumer._dialer) == len(here), TIMEOUT_S)
    slow_names.answer.set()
    for heard in here:
        require_open(heard)
    assert slow_names.begun == {"name.example": 1}


def test_a_name_that_does_not_resolve_keeps_no_other_name_out(make_loop: MakeLoop, set_names: SetNames) -> None:
    names = SlowNames()
    set_names(lambda host: names(host) if host == "dead.example" else ["127.0.0.1"])
    here, consumer = Recorder(), make_loop("consumer")
    _, port = make_loop("producer").listen("127.0.0.1", 0, Recorder().handlers)
    for _ in range(2 * MAX_NAMES):
        given_up = Recorder()
        consumer.end(consumer.connect("dead.example", port, None, given_up.handlers), CloseReason.TOO_SLOW)
        assert given_up.until_closed() is CloseReason.TOO_SLOW
    consumer.connect("good.example", port, "producer", here.handlers)
    require_open(here)
    # A connection that begins during an old lookup uses its answer.
    late = Recorder()
    consumer.connect("dead.example", port, "producer", late.handlers)
    until(lambda: len(consumer._dialer) == 1, TIMEOUT_S)
    names.answer.set()
    require_open(late)
    assert names.begun == {"dead.example": 1}


def test_a_name_that_waits_has_the_time_limit_of_a_connection(make_loop: MakeLoop, slow_names: SlowNames) -> None:
    consumer = make_loop("consumer", WireLimits(handshake_timeout_s=0.1))
    given_up = [Recorder() for _ in range(MAX_NAMES + 1)]
    for number, heard in enumerate(given_up):
        consumer.connect(f"name{number}.example", 1, None, heard.handlers)
    assert {heard.until_closed() for heard in given_up} == {CloseReason.TOO_SLOW}
    assert slow_names.most_at_once <= MAX_NAMES


def test_the_connection_that_waits_longest_makes_room_for_a_new_one(make_loop: MakeLoop, slow_names: SlowNames) -> None:
    consumer = make_loop("consumer", msgspec.structs.replace(KEPT, max_connections=2))
    _, port = make_loop("producer").listen("127.0.0.1", 0, Recorder().handlers)
    waiting, here = [Recorder() for _ in range(2)], Recorder()
    for number, heard in enumerate(waiting):
        consumer.connect(f"name{number}.example", port, None, heard.handlers)
    consumer.connect("127.0.0.1", port, "producer", here.handlers)
    require_open(here)
    assert waiting[0].until_closed() is CloseReason.TOO_MANY
    assert waiting[1].closed == []


def test_the_time_for_a_lookup_counts_when_the_oldest_connection_makes_room(
    make_loop: MakeLoop, slow_names: SlowNames
) -> None:
    consumer = make_loop("consumer", msgspec.structs.replace(KEPT, max_connections=2))
    named, numeric, here = Recorder(), Recorder(), Recorder()
    _, port = make_loop("producer").listen("127.0.0.1", 0, Recorder().handlers)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        consumer.connect("name.example", silent.getsockname()[1], None, named.handlers)
        consumer.connect("127.0.0.1", silent.getsockname()[1], None, numeric.handlers)
        until(lambda: len(consumer._connections) == 1, TIMEOUT_S)
        slow_names.answer.set()
        until(lambda: len(consumer._connections) == 2, TIMEOUT_S)
        consumer.connect("127.0.0.1", port, "producer", here.handlers)
        require_open(here)
        assert named.until_closed() is CloseReason.TOO_MANY
        assert numeric.closed == []
