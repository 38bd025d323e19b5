"""Inspection, verification and deletion of a store without its engine change nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_store import flip, make_index, make_medium, options_for, payload_offset, segment_path, store

from hybridkv.tiers import Slot, TierConfigurationError
from hybridkv.tiers.contract import FailureReason
from hybridkv.tiers.disk.inspection import Damage, StoreInspector

OPTIONS = options_for(1 << 20)
CHUNKS = {b"key %d" % number: bytes([number]) * (3000 + number) for number in range(8)}


def fill(path: Path, **changes: object) -> dict[bytes, Slot]:
    """Store all chunks and close. Their slots."""
    index = make_index(path, OPTIONS, **changes)
    medium = make_medium(path, OPTIONS, **changes)
    slots = {}
    for key, chunk in CHUNKS.items():
        assert store(index, medium, key, chunk)
        slot = index.pin(key)
        assert slot is not None
        slots[key] = slot
        index.unpin(key)
    medium.close()
    index.close()
    return slots


def content(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def damages(path: Path, name: str) -> list[Damage]:
    rows = list(StoreInspector(str(path)).verify(name))
    assert [done for done, _, _ in rows] == list(range(1, len(rows) + 1))
    assert {total for _, total, _ in rows} <= {len(rows)}
    return [damage for _, _, damage in rows if damage is not None]


def test_a_report_equals_a_start_and_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "kv")
    before = content(tmp_path)
    inspector = StoreInspector(str(tmp_path / "kv"))
    [name] = inspector.names()
    report = inspector.report(name)
    assert (report.num_records, report.record_bytes) == (len(CHUNKS), sum(map(len, CHUNKS.values())))
    assert (report.holder, report.problem, report.num_quarantined) == ("", "", 0)
    assert report.facts == {"model": "tiny", "dtype": "bfloat16"}
    assert report.num_segments > 0 and report.disk_bytes > report.record_bytes and report.opened_s > 0
    assert damages(tmp_path / "kv", name) == []
    assert content(tmp_path) == before


def test_each_namespace_is_reported_last_opened_first(tmp_path: Path) -> None:
    fill(tmp_path / "kv", model="old")
    fill(tmp_path / "kv", model="new")
    inspector = StoreInspector(str(tmp_path / "kv"))
    assert [inspector.report(name).facts["model"] for name in inspector.names()] == ["new", "old"]


def test_a_store_can_be_inspected_while_its_engine_runs(tmp_path: Path) -> None:
    index, medium = make_index(tmp_path / "kv", OPTIONS), make_medium(tmp_path / "kv", OPTIONS)
    for key, chunk in CHUNKS.items():
        assert store(index, medium, key, chunk)
    inspector = StoreInspector(str(tmp_path / "kv"))
    [name] = inspector.names()
    assert inspector.report(name).num_records == len(CHUNKS)
    assert damages(tmp_path / "kv", name) == []
    assert not inspector.delete(name), "an engine has it open"
    assert index.lookup(b"key 1").name == "HIT"
    medium.close()
    index.close()
    assert inspector.delete(name)
    assert inspector.names() == []


@pytest.mark.parametrize("is_header", [False, True])
def test_a_damaged_record_is_reported(tmp_path: Path, is_header: bool) -> None:
    slot = fill(tmp_path / "kv")[b"key 3"]
    flip(segment_path(tmp_path / "kv", slot), payload_offset(slot) + (-4096 + 20 if is_header else 100))
    [name] = StoreInspector(str(tmp_path / "kv")).names()
    [damage] = damages(tmp_path / "kv", name)
    assert (damage.key, damage.rank, damage.failure.reason) == (b"key 3", 0, FailureReason.CHECKSUM)


def test_records_of_a_missing_segment_are_not_counted(tmp_path: Path) -> None:
    slot = fill(tmp_path / "kv")[b"key 3"]
    segment_path(tmp_path / "kv", slot).unlink()
    inspector = StoreInspector(str(tmp_path / "kv"))
    [name] = inspector.names()
    assert inspector.report(name).num_records < len(CHUNKS)
    assert damages(tmp_path / "kv", name) == []


def test_a_path_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierConfigurationError, match="No such file"):
        StoreInspector(str(tmp_path / "none"))
    assert StoreInspector(str(tmp_path)).names() == []
