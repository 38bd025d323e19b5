"""`hybridkv inspect`, `verify` and `clear` on directories that the real disk tier wrote."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hybridkv.cli.app import main
from hybridkv.hashing import Fingerprint
from hybridkv.tiers import Slot, Ticket
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, Fsync
from kits.tiers.inline_janitor import InlineJanitor

OPTIONS = DiskOptions(capacity_bytes=64 << 20, fsync=Fsync.NONE)
TIMEOUT_S = 60.0
NUM_CHUNKS, CHUNK_BYTES = 5, 10_000


class Engine:
    """The disk tier of one engine, open, with a few chunks."""

    def __init__(self, path: Path, model: str) -> None:
        facts = {"model": model, "dtype": "bfloat16"}
        fingerprint = Fingerprint(
            facts=facts, chunk_tokens=64, hash_algorithm="sha256", tensor_parallel_size=1, groups=()
        )
        self.index = DiskIndex(str(path), fingerprint, OPTIONS, InlineJanitor())
        self.medium = DiskMedium(str(path), fingerprint.digest(), 0, OPTIONS)
        self.name = fingerprint.digest().hex()
        for number in range(NUM_CHUNKS):
            key = b"key %d" % number
            slot = self.index.reserve(key, CHUNK_BYTES)
            assert isinstance(slot, Slot)
            self.medium.store(Ticket(number), key, slot, [bytes([number + 1]) * CHUNK_BYTES])
            assert self.medium.drain(TIMEOUT_S)
            assert [completion.failure for completion in self.medium.poll()] == [None]
            assert self.index.commit(key)

    def close(self) -> None:
        self.medium.close()
        self.index.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def run(*arguments: object, answer: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=answer)


def damage(path: Path, engine: Engine) -> None:
    """Changes one byte of the payload of a chunk."""
    for file in path.glob(f"{engine.name}/rank-0/segment-*"):
        data = file.read_bytes()
        place = data.find(bytes([3]) * 1000)
        if place >= 0:
            file.write_bytes(data[: place + 500] + b"\xff" + data[place + 501 :])
            return
    raise AssertionError("no segment has the chunk")


def test_inspect_shows_each_cache_and_the_facts_that_differ(path: Path) -> None:
    for model in ("first", "second"):
        Engine(path, model).close()
    result = run("inspect", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("5 chunks, 48.83 KiB, in ") == 2
    assert "model: first" in result.stdout and "model: second" in result.stdout
    assert "dtype" not in result.stdout, "equal in both"
    reports = json.loads(run("inspect", path, "--json").stdout)
    assert [report["num_records"] for report in reports] == [NUM_CHUNKS] * 2
    assert reports[0]["facts"] == {"model": "second", "dtype": "bfloat16"}


def test_inspect_shows_the_facts_of_other_caches_if_those_of_one_are_lost(path: Path) -> None:
    for model in ("first", "second", "third"):
        Engine(path, model).close()
    lost, *others = json.loads(run("inspect", path, "--json").stdout)
    (path / lost["name"] / "namespace.json").write_bytes(b"lost")
    stdout = run("inspect", path).stdout
    assert all(f"model: {each['facts']['model']}" in stdout for each in others)
    assert "model: unknown" in stdout


def test_verify_finds_only_the_damaged_record(path: Path) -> None:
    engine = Engine(path, "tiny")
    engine.close()
    assert run("verify", path).exit_code == 0
    damage(path, engine)
    result = run("verify", path)
    assert result.exit_code == 1
    assert f"{engine.name[:12]}: 5 records, 1 damaged" in result.stdout
    assert f"{b'key 2'.hex()} on rank 0: checksum" in result.stdout
    [report] = json.loads(run("verify", path, "--json").stdout)
    assert report["num_damaged"] == len(report["damages"]) == 1


def test_clear_asks_and_deletes_the_named_cache(path: Path) -> None:
    first, second = (Engine(path, model) for model in ("first", "second"))
    first.close()
    second.close()
    assert run("clear", path, answer="n\n").exit_code == 1
    assert run("clear", path, "--namespace", first.name[:8], "--yes").exit_code == 0
    [left] = json.loads(run("inspect", path, "--json").stdout)
    assert left["name"] == second.name
    assert run("clear", path, answer="y\n").exit_code == 0
    assert run("inspect", path).stdout == "no cache\n"


def test_an_empty_namespace_deletes_nothing(path: Path) -> None:
    Engine(path, "tiny").close()
    assert run("clear", path, "--namespace", "", "--yes").exit_code == 2
    assert len(json.loads(run("inspect", path, "--json").stdout)) == 1


def test_verify_reports_a_segment_with_a_damaged_header(path: Path) -> None:
    engine = Engine(path, "tiny")
    engine.close()
    for file in path.glob(f"{engine.name}/rank-0/segment-*"):
        file.write_bytes(b"\xff" * 100 + file.read_bytes()[100:])
    result = run("verify", path)
    assert result.exit_code == 1 and "segments are damaged, cleared or unreadable" in result.stdout


def test_clear_deletes_by_age(path: Path) -> None:
    old, new = (Engine(path, model) for model in ("old", "new"))
    old.close()
    new.close()
    ten_days_ago = time.time() - 10 * 86_400
    os.utime(path / old.name / "LOCK", (ten_days_ago, ten_days_ago))
    assert run("clear", path, "--older-than", 11, "--yes").stdout == "no cache\n"
    assert run("clear", path, "--older-than", 9, "--yes").exit_code == 0
    assert [left["name"] for left in json.loads(run("inspect", path, "--json").stdout)] == [new.name]


def test_clear_refuses_a_cache_that_an_engine_has_open(path: Path) -> None:
    engine = Engine(path, "tiny")
    result = run("clear", path, "--yes")
    assert result.exit_code == 2 and "an engine has it open" in result.stderr
    assert json.loads(run("inspect", path, "--json").stdout)[0]["num_records"] == NUM_CHUNKS
    engine.close()


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("clear", "--yes")])
def test_an_unreadable_directory_is_an_error(tmp_path: Path, command: tuple[str, ...]) -> None:
    result = run(command[0], tmp_path / "none", *command[1:])
    assert result.exit_code == 2
    assert "path: expected a directory that can be used" in result.stderr and "No such file" in result.stderr


def test_gc_deletes_old_caches_of_a_disk_and_keeps_open_ones(path: Path) -> None:
    old, new = (Engine(path, model) for model in ("old", "new"))
    old.close()
    ten_days_ago = time.time() - 10 * 86_400
    os.utime(path / old.name / "LOCK", (ten_days_ago, ten_days_ago))
    assert "nothing to delete" in run("gc", path).stdout
    dry = run("gc", path, "--older-than", 9)
    assert dry.exit_code == 0 and "a dry run" in dry.stdout and old.name[:12] in dry.stdout
    assert len(json.loads(run("inspect", path, "--json").stdout)) == 2
    refused = run("gc", path, "--older-than", 0, "--delete")
    assert refused.exit_code == 2 and f"{new.name[:12]}: an engine has it open" in refused.stderr
    assert refused.stdout.splitlines()[-1] == "deleted 1 of 2"
    assert [left["name"] for left in json.loads(run("inspect", path, "--json").stdout)] == [new.name]
    new.close()
    assert run("gc", path, "--capacity", "1GiB").exit_code == 2
