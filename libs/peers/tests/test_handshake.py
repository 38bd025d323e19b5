"""Nobody who does not know the secret is told anything, and nothing that was heard can be said again."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_pair import IDENTITY, LIMITS, OTHER, established, identity

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.wire import (
    Channel,
    ClientHandshake,
    CloseReason,
    Established,
    FrameReader,
    Identity,
    MessageCodec,
    Opener,
    Ping,
    Sealer,
    Secret,
    ServerHandshake,
    Session,
    WireError,
    frame,
)
from hybridkv.peers.wire.handshake import Challenge, Goodbye, Hello, Proof

encode = msgspec.msgpack.encode


def client(key: Identity = IDENTITY, nonce: int = 1, expected: str | None = None) -> ClientHandshake:
    return ClientHandshake(key, Channel.CONTROL, bytes([nonce]) * 32, expected)


def server(key: Identity = OTHER, nonce: int = 2, channel: Channel = Channel.CONTROL) -> ServerHandshake:
    return ServerHandshake(key, channel, bytes([nonce]) * 32)


def talk(one: ClientHandshake, other: ServerHandshake) -> tuple[Established, Established]:
    challenge, _ = other.receive(one.first)
    assert challenge is not None
    proof, _ = one.receive(challenge)
    assert proof is not None
    answer, accepted = other.receive(proof)
    assert answer is not None
    assert accepted is not None
    _, established_too = one.receive(answer)
    assert established_too is not None
    return established_too, accepted


def reason_of(call: object, *arguments: object) -> CloseReason:
    with pytest.raises(WireError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.reason


def test_two_sides_with_one_secret_have_the_same_keys_and_each_others_names() -> None:
    ours, theirs = talk(client(), server())
    assert ours.keys == theirs.keys
    assert (ours.peer_name, theirs.peer_name) == ("other", "one")
    assert ours.keys.from_client != ours.keys.from_server


def test_keys_differ_from_session_to_session() -> None:
    first, _ = talk(client(nonce=1), server())
    assert talk(client(nonce=3), server())[0].keys != first.keys
    assert talk(client(), server(nonce=3))[0].keys != first.keys


def test_a_wrong_secret_is_refused_by_the_server() -> None:
    one, other = client(identity("one", b"another secret, of the same size")), server()
    challenge, _ = other.receive(one.first)
    assert challenge is not None
    proof, _ = one.receive(challenge)
    assert reason_of(other.receive, proof) is CloseReason.SECRET


def test_a_server_with_a_wrong_secret_is_refused_by_the_client() -> None:
    one = client()
    liar = server(identity("other", b"another secret, of the same size"))
    challenge, _ = liar.receive(one.first)
    assert challenge is not None
    one.receive(challenge)
    assert reason_of(one.receive, encode(Proof(b"\0" * 32))) is CloseReason.SECRET


def test_what_a_client_said_once_proves_nothing_to_another_challenge() -> None:
    one, other = client(), server()
    challenge, _ = other.receive(one.first)
    assert challenge is not None
    proof, _ = one.receive(challenge)
    again = server(nonce=9)
    again.receive(one.first)
    assert reason_of(again.receive, proof) is CloseReason.SECRET


def test_a_side_cannot_be_shown_its_own_proof() -> None:
    one, other = client(), server()
    challenge, _ = other.receive(one.first)
    assert challenge is not None
    proof, _ = one.receive(challenge)
    assert proof is not None
    assert reason_of(one.receive, proof) is CloseReason.SECRET


def test_a_server_is_not_asked_to_answer_its_own_challenge() -> None:
    """Whoever has no secret opens two connections and lets the server prove itself to itself."""
    first, second = server(nonce=2), server(nonce=3)
    challenge, _ = first.receive(encode(Hello("hybridkv.peers", 1, "control", "stranger", b"\x03" * 32)))
    assert challenge is not None
    second.receive(encode(Hello("hybridkv.peers", 1, "control", "stranger", b"\x02" * 32)))
    # A server never makes a client's proof, so there is nothing to hand on but what it is not.
    for body in (challenge, encode(Proof(b"")), encode(Proof(b"\0" * 32))):
        with pytest.raises(WireError):
            second.receive(body)


def test_a_proof_for_data_is_none_for_control() -> None:
    one = ClientHandshake(IDENTITY, Channel.DATA, b"\1" * 32)
    assert reason_of(server().receive, one.first) is CloseReason.UNEXPECTED


def test_another_version_is_refused_by_either_side() -> None:
    hello = encode(Hello("hybridkv.peers", 2, "control", "one", b"\1" * 32))
    assert reason_of(server().receive, hello) is CloseReason.VERSION
    challenge = encode(Challenge(7, "other", b"\1" * 32))
    assert reason_of(client().receive, challenge) is CloseReason.VERSION


def test_who_answers_must_be_who_was_asked_for() -> None:
    challenge, _ = server().receive(client().first)
    assert reason_of(client(expected="somebody").receive, challenge) is CloseReason.WRONG_PEER
    assert client(expected="other").receive(challenge or b"")[0] is not None


def test_an_engine_does_not_talk_to_itself() -> None:
    assert reason_of(server(IDENTITY).receive, client().first) is CloseReason.SELF


def test_a_stranger_is_sent_nothing_that_was_made_with_the_secret_and_no_message() -> None:
    """All that a server says before it was shown a proof: its version, name and nonce, and why it goes."""
    session = Session(server(), LIMITS)
    session.feed(frame(client().first))
    assert session.next() is None
    with pytest.raises(WireError, match="unexpected"):
        session.seal(MessageCodec(LIMITS).encode(Ping()))
    assert bytes(session.output) == frame(encode(Challenge(1, "other", b"\2" * 32)))
    session.feed(frame(encode(Proof(b"\0" * 32))))
    assert reason_of(session.next) is CloseReason.SECRET
    assert bytes(session.output) == frame(encode(Challenge(1, "other", b"\2" * 32)))
    assert session.last_words(CloseReason.SECRET) == frame(encode(Goodbye("secret", 1)))


def test_a_message_in_place_of_a_proof_is_refused() -> None:
    session = Session(server(), LIMITS)
    session.feed(frame(client().first))
    session.feed(frame(Sealer(b"k" * 32).seal(MessageCodec(LIMITS).encode(Ping()))))
    with pytest.raises(WireError):
        session.next()


@pytest.mark.parametrize("change", ["flip", "again", "skip", "swap", "cut", "other_direction"])
def test_a_frame_that_was_touched_has_no_right_seal(change: str) -> None:
    ours, theirs = established()
    sealed = [ours.seal(b"first"), ours.seal(b"second"), ours.seal(b"third")]
    assert theirs.open(sealed[0]) == b"first"
    touched = {
        "flip": sealed[1][:-1] + bytes([sealed[1][-1] ^ 1]),
        "again": sealed[0],
        "skip": sealed[2],
        "swap": sealed[2],
        "cut": sealed[1][:20],
        "other_direction": Sealer(b"k" * 32).seal(b"second"),
    }
    assert reason_of(theirs.open, touched[change]) is CloseReason.SEAL
    assert Opener is type(theirs)


def test_untouched_frames_are_opened_in_order() -> None:
    ours, theirs = established()
    assert [theirs.open(ours.seal(body)) for body in (b"", b"a", b"b" * 1000)] == [b"", b"a", b"b" * 1000]


def test_a_frame_that_is_too_long_is_refused_before_it_arrives() -> None:
    reader = FrameReader(1024)
    reader.feed((1025).to_bytes(4, "big"))
    assert reason_of(reader.next) is CloseReason.OVERSIZED


def test_before_a_proof_frames_are_short() -> None:
    session = Session(server(), LIMITS)
    session.feed((LIMITS.max_handshake_frame_bytes + 1).to_bytes(4, "big"))
    assert reason_of(session.next) is CloseReason.OVERSIZED


@given(bodies=st.lists(st.binary(max_size=50), max_size=8), cuts=st.lists(st.integers(1, 40), max_size=30))
def test_frames_come_out_as_they_went_in_however_they_arrive(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(body) for body in bodies)
    reader, found = FrameReader(64), []
    for size in [*cuts, len(stream)]:
        reader.feed(stream[:size])
        stream = stream[size:]
        while (body := reader.next()) is not None:
            found.append(body)
    assert found == bodies
    assert reader.num_buffered_bytes == 0


@given(data=st.binary(max_size=300), as_frame=st.booleans(), is_server=st.booleans(), is_begun=st.booleans())
def test_a_handshake_survives_any_bytes_and_says_nothing_more(
    data: bytes, as_frame: bool, is_server: bool, is_begun: bool
) -> None:
    session = Session(server() if is_server else client(), LIMITS)
    if is_begun and is_server:
        session.feed(frame(client().first))
        session.next()
    said = bytes(session.output)
    session.feed(frame(data) if as_frame else data)
    with contextlib.suppress(WireError):
        while session.next() is not None:
            pass
    assert session.established is None
    assert len(session.output) <= len(said) + LIMITS.max_handshake_frame_bytes


_frames = st.one_of(
    st.builds(Hello, st.text(max_size=20), st.integers(0, 3), st.text(max_size=9), st.text(max_size=200), st.binary()),
    st.builds(Challenge, st.integers(0, 3), st.text(max_size=200), st.binary(max_size=64)),
    st.builds(Proof, st.binary(max_size=64)),
    st.builds(Goodbye, st.text(max_size=20), st.integers()),
)


@given(st.lists(_frames, max_size=4), st.booleans())
def test_frames_of_the_right_shape_prove_nothing(frames: list[Hello | Challenge | Proof | Goodbye], late: bool) -> None:
    for side in (server(), client()):
        if late and isinstance(side, ServerHandshake):
            side.receive(client().first)
        for each in frames:
            try:
                _, result = side.receive(encode(each))
            except (WireError, OverflowError):
                break
            assert result is None


def test_a_name_has_a_size() -> None:
    for name in ("", "x" * 200):
        with pytest.raises(PeersConfigurationError):
            identity(name)
    hello = encode(Hello("hybridkv.peers", 1, "control", "x" * 200, b"\1" * 32))
    assert reason_of(server().receive, hello) is CloseReason.OVERSIZED


def test_keys_and_secrets_do_not_show() -> None:
    shown = repr([IDENTITY, Secret(b"very secret indeed"), talk(client(), server())])
    assert "very secret" not in shown
    assert IDENTITY.key.hex() not in shown
    assert repr(IDENTITY.key) not in shown
