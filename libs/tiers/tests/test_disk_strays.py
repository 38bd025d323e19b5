"""Foreign or false names in a store are left alone, logged once, and not read. The store goes on beside them."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path

import disk_faults
import disk_store
import pytest
from examples import thinned

from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason, Refusal, Slot, Ticket, TierConfigurationError
from hybridkv.tiers.disk.files.other_files import MAX_NAME_CHARACTERS, MAX_NAMES
from hybridkv.tiers.disk.format import changes, snapshot
from hybridkv.tiers.disk.format.layout import (
    LARGEST_EPOCH,
    LARGEST_FIRST_NUMBER,
    LARGEST_NUMBER,
    address_of,
    number_of,
    segment_name,
)
from hybridkv.tiers.disk.format.segment import SegmentHeader, encode_segment
from hybridkv.tiers.disk.format.withdrawals import JournalEntry, encode_epoch, encode_journal_entry, encode_journal_head

OPTIONS = disk_store.options_for(8 * 8192, direct=False)
DIGEST = disk_store.FINGERPRINT.digest()
CHUNK = b"x" * 4000
SEGMENT_BYTES = OPTIONS.segment_bytes or 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Store with one chunk."""
    path = tmp_path / "store"
    use(path, b"first")
    return path


def namespace_of(path: Path) -> Path:
    return path / DIGEST.hex()


def rank_of(path: Path) -> Path:
    return namespace_of(path) / "rank-0"


def use(path: Path, key: bytes, *before: bytes) -> int:
    """Open the store, load earlier chunks, store one more, and close. Number of the segment of that chunk."""
    index = disk_store.make_index(path, OPTIONS)
    medium = disk_store.make_medium(path, OPTIONS)
    for old_key in before:
        loaded = disk_store.load(index, medium, old_key)
        assert loaded is not None and (loaded[0].failure, loaded[1]) == (None, CHUNK)
    assert disk_store.store(index, medium, key, CHUNK)
    number = number_of(disk_store.records_of(index)[key].address)
    medium.close()
    index.close()
    return number


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


STRAYS = [
    "rank-0/segment-2147483648",
    "rank-0/segment-2147483650",
    "rank-0/segment-9999999999",
    "rank-0/segment-01",
    "rank-0/segment-00000000001",
    "rank-0/segment-" + 10 * "\N{ARABIC-INDIC DIGIT ONE}",
    "rank-0/segment--000000001",
    "rank-0/Segment-0000000001",
    "rank-0/segment-0000000001.new",
    "rank-0/segment-0000000001\n",
    "rank-0/snapshot",
    "rank-1",
    "rank-00",
    "rank--1",
    "RANK-0",
    "segment-0000000001",
    "Snapshot",
    "snapshot.new.new",
    "LOCK.new",
]


@pytest.mark.parametrize(("name", "kind"), thinned([*product(STRAYS, ["file", "directory"])], 3))
def test_a_foreign_name_is_logged_once_and_left_alone(
    path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    stray = namespace_of(path) / name
    kept = stray / "within" if kind == "directory" else stray
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("kept")
    assert use(path, b"second", b"first") < 10
    [line] = warnings(caplog)
    assert str(stray.parent) in line and line.endswith(f"left alone: {stray.name!a}")
    assert use(path, b"third", b"first", b"second") < 10
    assert kept.read_text() == "kept"


@pytest.mark.parametrize("name", ["README", "A" * 64, "0" * 63, 64 * "\N{ARABIC-INDIC DIGIT ZERO}"])
def test_a_foreign_directory_beside_the_namespaces_is_left_alone(
    path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (path / name).mkdir()
    (path / "lost+found").mkdir()
    use(path, b"second", b"first")
    [line] = warnings(caplog)
    assert line.endswith(f"left alone: {name!a}")
    assert (path / name).is_dir()


def test_many_foreign_names_are_one_log_line_of_bounded_length(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(MAX_NAMES + 92):
        (rank_of(path) / (f"{number:03d}" * 60)).touch()
    use(path, b"second", b"first")
    [line] = warnings(caplog)
    assert line.endswith(" and 92 more")
    assert len(line) < len(str(path)) + 250 + MAX_NAMES * (MAX_NAME_CHARACTERS + 4)


def test_a_store_without_foreign_names_logs_no_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use(path, b"second", b"first")
    assert warnings(caplog) == []


@pytest.mark.parametrize("number", [7, LARGEST_FIRST_NUMBER, LARGEST_FIRST_NUMBER + 1, LARGEST_NUMBER])
@pytest.mark.parametrize("data", [b"", b"\0" * SEGMENT_BYTES, b"another's"])
def test_a_segment_without_a_header_costs_nothing(path: Path, number: int, data: bytes) -> None:
    stray = rank_of(path) / segment_name(number)
    stray.write_bytes(data)
    stray.chmod(0o600)
    assert use(path, b"second", b"first") < 7
    assert not stray.exists()
    assert use(path, b"third", b"first", b"second") < 10


def header_of(number: int, epoch: int = 0, segment_bytes: int = SEGMENT_BYTES) -> bytes:
    return encode_segment(SegmentHeader(0, number, epoch, segment_bytes, DIGEST))


def write(file: Path, data: bytes, num_bytes: int) -> None:
    """Write a sparse file of this size."""
    file.write_bytes(data)
    os.truncate(file, num_bytes)
    file.chmod(0o600)


@pytest.mark.parametrize("number", [LARGEST_FIRST_NUMBER, LARGEST_FIRST_NUMBER + 1, LARGEST_NUMBER])
def test_a_store_with_used_up_segment_numbers_starts_again(
    path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    write(rank_of(path) / segment_name(number), header_of(number), SEGMENT_BYTES)
    assert use(path, b"second") < 10
    assert [line for line in warnings(caplog) if "numbers of segments are used up; beginning anew" in line]
    assert use(path, b"third", b"second") < 10
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("number", [LARGEST_FIRST_NUMBER, LARGEST_FIRST_NUMBER + 1, LARGEST_NUMBER])
def test_a_last_number_of_an_earlier_epoch_does_not_start_the_store_again(path: Path, number: int) -> None:
    write(rank_of(path) / segment_name(number), header_of(number, epoch=7), SEGMENT_BYTES)
    assert use(path, b"second", b"first") < 10


@pytest.mark.parametrize("name", ["quarantine", "snapshot", "changes"])
def test_metadata_with_the_last_number_does_not_stop_a_store(path: Path, name: str) -> None:
    file = namespace_of(path) / name
    end = address_of(LARGEST_NUMBER, 8192)
    if name == "quarantine":
        entry = JournalEntry(bytes(16), end + (1 << 20), end)
        file.write_bytes(encode_journal_head(DIGEST) + encode_journal_entry(entry))
    elif name == "snapshot":
        saved = snapshot.Snapshot(0, 1 << 31, 1 << 31, 1 << 63, [], [], [], [])
        file.write_bytes(disk_store.encoded_snapshot(saved, DIGEST))
    else:
        data = file.read_bytes()
        base = snapshot.checksum_of((namespace_of(path) / "snapshot").read_bytes())
        found = changes.decode(data, DIGEST, base)
        assert found is not None and found.is_whole
        file.write_bytes(data + changes.encode_batch([changes.Reserved(end, 100)], found.last_checksum))
    file.chmod(0o600)
    assert use(path, b"second") < 10
    assert use(path, b"third", b"second") < 10


@pytest.mark.parametrize("name", ["quarantine", "snapshot", "changes"])
def test_metadata_beyond_the_last_number_is_damaged(path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    file = namespace_of(path) / name
    address = address_of(LARGEST_NUMBER + 1, 8192)
    if name == "quarantine":
        entries = [JournalEntry(bytes(16), address + 8192, 8192), JournalEntry(bytes(16), 8192, address)]
        file.write_bytes(encode_journal_head(DIGEST) + b"".join(map(encode_journal_entry, entries)))
        expected = "2 entries of the journal of withdrawn records (quarantine) are damaged"
    elif name == "snapshot":
        saved = snapshot.Snapshot(0, 1 << 31, (1 << 31) + 1, 1 << 63, [], [], [], [])
        file.write_bytes(disk_store.encoded_snapshot(saved, DIGEST))
        expected = "the snapshot is damaged"
    else:
        data = file.read_bytes()
        base = snapshot.checksum_of((namespace_of(path) / "snapshot").read_bytes())
        found = changes.decode(data, DIGEST, base)
        assert found is not None and found.is_whole
        file.write_bytes(data + changes.encode_batch([changes.Reserved(address, 100)], found.last_checksum))
        expected = "the end of the file of changes is damaged"
    file.chmod(0o600)
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        assert use(path, b"second", b"first") < 10
    assert [record for record in caplog.records if expected in record.getMessage()]
    assert use(path, b"third", b"first", b"second") < 10


def test_a_running_store_stops_at_the_last_segment_number(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = disk_store.make_index(path, OPTIONS)
    medium = disk_store.make_medium(path, OPTIONS)
    index._segments.next_number = LARGEST_NUMBER
    keys = [b"%d" % number for number in range(80)]
    stored = [key for key in keys if disk_store.store(index, medium, key, CHUNK)]
    assert len(stored) < len(keys)
    assert max(number_of(record.address) for record in disk_store.records_of(index).values()) == LARGEST_NUMBER
    assert index._segments.next_number == LARGEST_NUMBER + 1
    assert index.reserve(b"one more", 100) is Refusal.NO_ROOM
    assert [line for line in warnings(caplog) if "the numbers of segments are used up" in line]
    assert all(index.lookup(key) is LookupResult.HIT for key in stored[-5:])
    medium.close()
    index.close()
    assert use(path, b"second") < 10
    assert use(path, b"third", b"second") < 10


def test_a_last_epoch_does_not_stop_a_store(path: Path) -> None:
    for number in (LARGEST_EPOCH, LARGEST_EPOCH + 1, (1 << 64) - 1):
        (namespace_of(path) / "epoch").write_bytes(encode_epoch(number, DIGEST))
        write(rank_of(path) / segment_name(9), header_of(9, epoch=LARGEST_EPOCH), SEGMENT_BYTES)
        use(path, b"second")
        index = disk_store.make_index(path, OPTIONS)
        assert index.lookup(b"second") is LookupResult.HIT
        index.clear()
        index.close()
        use(path, b"third")
        use(path, b"fourth", b"third")


def test_half_written_files_are_removed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["snapshot.new", "changes.new", "quarantine.new", "epoch.new", "namespace.json.new"]
    for name in names:
        (namespace_of(path) / name).write_bytes(b"half")
        (namespace_of(path) / name).chmod(0o600)
    index = disk_store.make_index(path, OPTIONS)
    assert not [name for name in names if (namespace_of(path) / name).exists()]
    assert index.lookup(b"first") is LookupResult.HIT
    assert warnings(caplog) == []
    index.close()


OURS = ["LOCK", "namespace.json", "epoch", "snapshot", "changes", "quarantine", "rank-0/segment-0000000000"]


def make_pipe(file: Path) -> None:
    os.mkfifo(file, 0o600)


def make_socket(file: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            os.chdir(file.parent)  # the path of a socket is limited to about 100 bytes
            listener.bind(file.name)
        finally:
            os.fchdir(here)
            os.close(here)


def make_directory(file: Path) -> None:
    file.mkdir(mode=0o700)


def make_device(file: Path) -> None:
    try:
        os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except OSError as error:
        pytest.skip(f"this process cannot make a device: {error.strerror}")


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": make_pipe,
    "a socket": make_socket,
    "a directory": make_directory,
    "a device": make_device,
}


def within_time(call: Callable[[], None]) -> None:
    """Run `call` in a thread and fail if it does not return."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(disk_store.TIMEOUT_S)
    assert not thread.is_alive(), "it waits for a file"
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("name", "kind"), thinned([*product([*OURS, "snapshot.new", "epoch.new"], KINDS)], 3))
def test_a_special_file_under_one_of_our_names_is_refused(path: Path, name: str, kind: str) -> None:
    file = namespace_of(path) / name
    file.unlink(missing_ok=True)
    KINDS[kind](file)

    def start() -> None:
        with pytest.raises(TierConfigurationError) as caught:
            disk_store.make_index(path, OPTIONS)
        assert f"{file}: is {kind}, not a file" in str(caught.value)

    within_time(start)
    assert not stat.S_ISREG(file.lstat().st_mode)
    file.rmdir() if kind == "a directory" else file.unlink()
    use(path, b"second")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rank-0", ""])
def test_a_directory_name_that_is_no_directory_is_refused(path: Path, name: str, kind: str) -> None:
    if kind == "a directory":
        pytest.skip("it is a directory")
    place = namespace_of(path) / name
    place.rename(path.parent / "moved away")
    KINDS[kind](place)

    def start() -> None:
        with pytest.raises(TierConfigurationError, match=f"{place}: Not a directory"):
            disk_store.make_index(path, OPTIONS)

    within_time(start)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_store", [True, False])
def test_a_medium_does_not_wait_for_a_special_file(path: Path, kind: str, is_store: bool) -> None:
    index = disk_store.make_index(path, OPTIONS)
    slot = index.reserve(b"second", len(CHUNK))
    assert isinstance(slot, Slot)
    file = disk_store.segment_path(path, slot)
    file.unlink()
    KINDS[kind](file)
    medium = disk_store.make_medium(path, OPTIONS)
    (medium.store if is_store else medium.load)(Ticket(1), b"second", slot, [bytearray(CHUNK)])
    assert medium.drain(disk_store.TIMEOUT_S)
    [completion] = medium.poll()
    assert completion.failure is not None and completion.failure.reason is FailureReason.IO
    medium.close()
    index.abort(b"second")
    index.close()


@pytest.mark.parametrize(
    ("name", "kind"), thinned([*product(["LOCK", "namespace.json", "rank-0/segment-0000000000", "rank-0"], KINDS)], 3)
)
def test_special_files_of_a_neighbour_stop_no_start(path: Path, name: str, kind: str) -> None:
    """Also if it has to be deleted to make room."""
    index = disk_store.make_index(path, OPTIONS, model="neighbour")
    index.close()
    neighbour = path / disk_store.fingerprint(model="neighbour").digest().hex()
    if name == "rank-0":
        (neighbour / name).rename(path.parent / "moved away")
    else:
        (neighbour / name).unlink(missing_ok=True)
    KINDS[kind](neighbour / name)

    def start() -> None:
        index = disk_store.make_index(path, OPTIONS, model="third")
        index.close()

    within_time(start)


def full_beside(
    path: Path, name: str = "", before: Callable[[], object] = lambda: None, io: disk_faults.FaultyIO | None = None
) -> int:
    """Number of chunks that a cache takes beside a closed one, in a directory too small for both."""
    options = disk_store.options_for(8 * 8192, num_spare=3, direct=False)
    index = disk_store.make_index(path, options, model="neighbour")
    medium = disk_store.make_medium(path, options, model="neighbour")
    assert all(disk_store.store(index, medium, b"%d" % number, CHUNK) for number in range(30))
    medium.close()
    index.close()
    if name:
        stray = path / disk_store.fingerprint(model="neighbour").digest().hex() / name
        stray.parent.mkdir(exist_ok=True)
        stray.write_text("kept")
    before()
    index = disk_store.make_index(path, options, io)
    medium = disk_store.make_medium(path, options)
    taken = sum(disk_store.store(index, medium, b"%d" % number, CHUNK) for number in range(60))
    medium.close()
    index.close()
    return taken


@pytest.mark.parametrize(
    "name", ["notes", "rank-0/notes", "rank-7/notes", "rank-0/segment-9999999999", "notes/of mine"]
)
def test_deletion_of_a_stale_cache_leaves_foreign_files(tmp_path: Path, name: str) -> None:
    assert full_beside(tmp_path / "store", name) == 60
    neighbour = tmp_path / "store" / disk_store.fingerprint(model="neighbour").digest().hex()
    assert [found for found in neighbour.rglob("*") if found.is_file()] == [neighbour / name]
    assert (neighbour / name).read_text() == "kept"


def test_a_stale_cache_without_foreign_files_is_deleted_whole(tmp_path: Path) -> None:
    assert full_beside(tmp_path / "store") == 60
    assert [found.name for found in (tmp_path / "store").iterdir()] == [DIGEST.hex()]


def test_a_directory_named_like_a_cache_is_not_emptied(tmp_path: Path) -> None:
    """Other programs name directories by digests too."""
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    index.close()
    theirs = tmp_path / "store" / ("0" * 64)
    theirs.mkdir(mode=0o700)
    (theirs / "layer.tar").write_bytes(b"x" * OPTIONS.capacity_bytes)
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    assert index.reserve(b"key", 100) is Refusal.NO_ROOM
    assert (theirs / "layer.tar").exists()
    index.close()


def _file(path: Path) -> None:
    path.write_bytes(b"mine")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _link(path: Path) -> None:
    path.symlink_to(path.parent.parent)


@pytest.mark.parametrize("make", [_file, _loop, _link])
def test_a_file_or_link_named_like_a_cache_stops_no_store(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store" / ("a" * 64)
    assert full_beside(tmp_path / "store", before=lambda: make(path)) == 60
    assert os.path.lexists(path)
    [line] = warnings(caplog)
    assert line.endswith(f"left alone: {path.name!a}")


class ClosedNeighbourIO(disk_faults.FaultyIO):
    """Directory of another user, without access."""

    def stat_name(self, name: str, dir_fd: int) -> os.stat_result:
        if name.startswith("a" * 64 + "/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return super().stat_name(name, dir_fd)


def test_another_users_directory_named_like_a_cache_stops_no_store(tmp_path: Path) -> None:
    path = tmp_path / "store" / ("a" * 64)
    io = ClosedNeighbourIO()
    io.failing_names[path.name] = errno.EACCES
    assert full_beside(tmp_path / "store", before=lambda: path.mkdir(mode=0o700), io=io) == 60
    assert path.is_dir()


def test_the_log_names_foreign_files_if_no_cache_can_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    disk_store.make_index(path, OPTIONS).close()
    (path / ("0" * 64)).mkdir(mode=0o700)
    (path / ("0" * 64) / "theirs").write_bytes(b"x" * OPTIONS.capacity_bytes)
    (path / ("a" * 64)).write_bytes(b"mine")
    index = disk_store.make_index(path, OPTIONS)
    assert index.reserve(b"key", 100) is Refusal.NO_ROOM
    assert index.take_disk_counts().failures.keys() == {"create: EDQUOT"}
    assert "or files that are not the tier's" in caplog.text
    index.close()


def described(facts: str, chunk_tokens: str = "1") -> bytes:
    rest = '"hash_algorithm":"","tensor_parallel_size":1,"groups":[]'
    return f'{{"facts":{{{facts}}},"chunk_tokens":{chunk_tokens},{rest}}}'.encode()


HOSTILE_FACTS = [
    b"[" * 100_000,
    described("", "1" + 300 * "0"),
    described('"' + 200_000 * "." + '":""'),
    described('"a":"' + 200_000 * "b" + '"'),
    described('"a\\nb":"c"'),
]


@pytest.mark.parametrize("data", HOSTILE_FACTS)
def test_hostile_facts_of_a_neighbour_keep_the_log_short(
    path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    neighbour = path / ("0" * 64)
    neighbour.mkdir(mode=0o700)
    (neighbour / "namespace.json").write_bytes(data)
    (namespace_of(path) / "rank-0").rename(path.parent / "moved away")
    (namespace_of(path) / "namespace.json").unlink()
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        disk_store.make_index(path, OPTIONS, model="third").close()
    for record in caplog.records:
        assert len(record.getMessage()) < 20_000 and "\n" not in record.getMessage()


def test_deeply_nested_directories_stop_no_start(path: Path) -> None:
    deep = path / ("0" * 64)
    deep.mkdir(mode=0o700)
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(deep)
        for _ in range(1200):
            os.mkdir("a", 0o700)
            os.chdir("a")
        os.fchdir(here)
        use(path, b"second", b"first")
        os.chdir(deep)
        depth = 0
        while os.path.isdir("a"):
            os.chdir("a")
            depth += 1
        for _ in range(depth):  # pytest cannot remove them
            os.chdir("..")
            os.rmdir("a")
    finally:
        os.fchdir(here)
        os.close(here)
    assert depth == 1200
