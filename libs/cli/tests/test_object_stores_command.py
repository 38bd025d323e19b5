"""`hybridkv inspect`, `verify` and `gc` on a directory that the real object tier wrote."""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from pathlib import Path

import patience
import pytest
from click.testing import CliRunner, Result

from hybridkv.cli.app import main
from hybridkv.tiers import Slot, Ticket
from hybridkv.tiers.object import ObjectOptions, StoreLocation, open_index, open_medium

NUM_CHUNKS, CHUNK_BYTES = 5, 10_000
SECRET = "a secret of a whole fleet"
DAY_S = 86_400.0


def store(path: Path, seed: bytes = b"a", secret: bytes = b"") -> None:
    """Stores the chunks of one path, as an engine does before it ends."""
    location = StoreLocation(f"file://{path}", secret=secret)
    options = ObjectOptions(pack_bytes=25_000)
    index = open_index(location, bytes(32), 1, options, time.monotonic)
    medium = open_medium(location, 0, options)
    keys = [b"f" * 16 + seed + bytes([number]) * 31 for number in range(NUM_CHUNKS)]
    for number, key in enumerate(keys):
        slot = index.reserve(key, CHUNK_BYTES, tuple(keys[max(0, number - 1) : number]))
        assert isinstance(slot, Slot)
        medium.store(Ticket(number), key, slot, [bytes([number + 1]) * CHUNK_BYTES])
    index.end_batch()
    assert medium.drain(patience.seconds(10.0))
    for key, completion in zip(keys, medium.poll(), strict=True):
        assert completion.failure is None and index.commit(key)
    medium.close()
    index.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fleet"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def url(path: Path) -> str:
    return f"file://{path}"


def make_old(path: Path, age_s: float) -> None:
    at_s = time.time() - age_s
    for each in path.rglob("*"):
        os.utime(each, (at_s, at_s))


def packs(path: Path) -> list[Path]:
    return sorted(path.glob("*/p/*/*"))


def test_inspect_shows_packs_manifests_and_other_objects(path: Path) -> None:
    store(path)
    (path / "README").write_text("mine")
    result = run("inspect", url(path))
    assert result.exit_code == 0, result.output
    assert "3 packs" in result.stdout and "manifests" in result.stdout
    assert "1 other objects, 4 B, not hybridkv's" in result.stdout
    document = json.loads(run("inspect", url(path), "--json").stdout)
    [cache] = document["caches"]
    assert cache["num_packs"] == 3 and cache["num_manifests"] > 0
    assert cache["pack_bytes"] == sum(pack.stat().st_size for pack in packs(path))


def test_verify_reads_every_chunk_and_finds_the_damaged_one(path: Path) -> None:
    store(path)
    assert run("verify", url(path)).exit_code == 0
    pack = packs(path)[0]
    data = bytearray(pack.read_bytes())
    data[500] ^= 1
    pack.write_bytes(data)
    result = run("verify", url(path))
    assert result.exit_code == 1 and f"{NUM_CHUNKS} chunks" in result.stdout and "1 damaged" in result.stdout
    report = json.loads(run("verify", url(path), "--json").stdout)
    assert report["num_damaged"] == 1 and report["damages"][0]["name"] == str(pack.relative_to(path))


def test_verify_names_a_truncated_pack_and_a_manifest_without_its_pack(path: Path) -> None:
    store(path)
    first, second = packs(path)[:2]
    first.unlink()
    second.write_bytes(second.read_bytes()[:-100])
    report = json.loads(run("verify", url(path), "--json").stdout)
    assert report["num_incomplete"] > 0 and report["num_damaged"] == 1
    manifest = next(path.glob("*/m/*"))
    manifest.write_bytes(b"x" * 100)
    assert json.loads(run("verify", url(path), "--json").stdout)["num_damaged"] == 2


def test_verify_checks_the_seals_only_with_the_secret(path: Path, tmp_path: Path) -> None:
    from hybridkv.peers.wire import read_secret
    from hybridkv.tiers.object import SECRET_PURPOSE

    secret, other = tmp_path / "secret", tmp_path / "other"
    for file, text in ((secret, SECRET), (other, "the secret of others")):
        file.write_text(text)
        file.chmod(0o600)
    store(path, secret=read_secret(str(secret)).derive(SECRET_PURPOSE))
    assert run("verify", url(path), "--secret-file", secret).exit_code == 0
    without = run("verify", url(path))
    assert without.exit_code == 0 and "give --secret-file" in without.stdout
    wrong = run("verify", url(path), "--secret-file", other, "--json")
    assert wrong.exit_code == 1 and json.loads(wrong.stdout)["num_damaged"] >= NUM_CHUNKS


def test_gc_only_reports_until_delete_is_given(path: Path) -> None:
    store(path)
    left = path / packs(path)[0].parts[-4] / "p" / f"{uuid.uuid4().hex}-1" / "0"
    left.parent.mkdir()
    left.write_bytes(b"left")
    make_old(path, DAY_S)
    dry = run("gc", url(path))
    assert dry.exit_code == 0 and "unlisted: 1 objects, 4 B" in dry.stdout and "a dry run" in dry.stdout
    assert left.exists() and "sweep.lock" not in os.listdir(path), "nothing is written"
    assert run("gc", url(path), "--delete").exit_code == 0
    assert not left.exists() and len(packs(path)) == 3
    assert "nothing to delete" in run("gc", url(path)).stdout


def test_gc_deletes_by_age_and_by_size(path: Path) -> None:
    store(path, b"a")
    make_old(path, 3 * DAY_S)
    store(path, b"b")
    report = json.loads(run("gc", url(path), "--older-than", 2, "--delete", "--json").stdout)
    assert report["reasons"]["least_recently_used"][0] > 3
    assert len(packs(path)) == 3
    run("gc", url(path), "--capacity", "1B", "--delete")
    assert not packs(path)


def test_gc_refuses_a_directory_that_another_process_sweeps(path: Path) -> None:
    store(path)
    fd = os.open(path / "sweep.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        result = run("gc", url(path), "--capacity", "1B", "--delete")
    finally:
        os.close(fd)
    assert result.exit_code == 2 and "sweep.lock is locked" in result.stderr
    assert len(packs(path)) == 3


@pytest.mark.parametrize("command", ["inspect", "verify", "gc"])
@pytest.mark.parametrize(
    ("place", "expected"),
    [("file:///nothing/here", "a directory that exists"), ("s4://bucket", "a store that obstore can open")],
)
def test_a_store_that_cannot_be_opened_is_an_error(command: str, place: str, expected: str) -> None:
    result = run(command, place)
    assert result.exit_code == 2 and expected in result.stderr


def test_an_unreachable_server_is_an_error() -> None:
    result = run("inspect", "s3://bucket/prefix", "--endpoint", "http://127.0.0.1:9", "--region", "r")
    assert result.exit_code == 2 and "a store that can be used" in result.stderr, result.output


@pytest.mark.parametrize("command", ["inspect", "verify", "gc"])
@pytest.mark.parametrize("place", ["s3://user:hunter2@bucket/prefix", "file://user:hunter2@host/directory"])
def test_a_url_with_credentials_is_refused_and_not_printed(command: str, place: str) -> None:
    result = run(command, place)
    assert result.exit_code == 2 and "a URL without credentials" in result.stderr
    assert "hunter2" not in result.output
