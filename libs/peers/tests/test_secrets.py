"""Secrets: read from a file that only its owner may access, never printed. Without a secret only loopback is
allowed."""

from __future__ import annotations

import pickle
from pathlib import Path

import patience
import pytest

from hybridkv.peers.control import ControlLoop
from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.wire import NO_SECRET, Secret, WireLimits, is_loopback, read_secret

WORDS = b"nobody knows these words"


def written(path: Path, data: bytes = WORDS, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_white_space_around_a_secret_is_ignored(tmp_path: Path) -> None:
    plain = read_secret(written(tmp_path / "plain"))
    spaced = read_secret(written(tmp_path / "spaced", b"\n " + WORDS + b" \n"))
    assert plain.derive(b"x") == spaced.derive(b"x")
    assert plain.derive(b"x") != plain.derive(b"y")
    assert plain.derive(b"x") != read_secret(written(tmp_path / "other", WORDS + b"!")).derive(b"x")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(PeersConfigurationError, match="only its owner"):
        read_secret(written(tmp_path / "file", mode=mode))


@pytest.mark.parametrize("data", [b"", b"short", b" " * 100, b"x" * 5000])
def test_a_secret_of_the_wrong_size_is_refused_and_not_printed(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(PeersConfigurationError) as caught:
        read_secret(written(tmp_path / "file", data))
    assert "short" not in str(caught.value)
    assert "xxxx" not in str(caught.value)


def test_a_directory_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(PeersConfigurationError) as caught:
            read_secret(path)
        assert caught.value.field == "secret_file"


def test_a_secret_is_neither_printed_nor_pickled() -> None:
    secret = Secret(WORDS)
    assert "words" not in f"{secret} {secret!r} {vars(type(secret))}"
    with pytest.raises(TypeError):
        pickle.dumps(secret)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_only_loopback_addresses_reach_no_other_host(host: str, is_ours: bool) -> None:
    assert is_loopback(host) is is_ours


def test_a_loop_without_a_secret_refuses_to_listen_for_other_hosts() -> None:
    loop = ControlLoop("name", NO_SECRET, WireLimits())
    try:
        from control_pair import Recorder

        with pytest.raises(PeersConfigurationError, match="secret_file"):
            loop.listen("0.0.0.0", 0, Recorder().handlers)
    finally:
        assert loop.close(patience.seconds(6.0))
