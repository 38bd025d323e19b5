"""What a disk gives up first, also where it must give up segments, and that it forgets which when it is closed."""

from __future__ import annotations

from pathlib import Path

import disk_store
import pytest

from hybridkv.planner import LookupResult

DATA = b"x" * 4000
NUM_RECORDS = 16


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_demoted_goes_first_where_segments_are_short(tmp_path: Path, is_told: bool) -> None:
    """Of two records in turn one is of no more use."""
    options = disk_store.options_for(NUM_RECORDS * 8192, num_spare=3)
    index = disk_store.make_index(tmp_path / "store", options)
    medium = disk_store.make_medium(tmp_path / "store", options)
    for number in range(300):
        assert disk_store.store(index, medium, b"%d" % number, DATA)
        if is_told and number % 2:
            index.demote([b"%d" % number])
    held = {number for number in range(300) if index.lookup(b"%d" % number) is LookupResult.HIT}
    useful = {number for number in held if number % 2 == 0}
    # Without a word both kinds are held alike.
    assert len(useful) >= NUM_RECORDS - 3 if is_told else len(useful) <= NUM_RECORDS // 2
    assert not is_told or min(useful) <= 300 - 2 * (NUM_RECORDS - 3)
    counts = index.take_disk_counts()
    assert counts.segments_dropped > 0
    for number in useful:
        loaded = disk_store.load(index, medium, b"%d" % number)
        assert loaded is not None and loaded[1] == DATA
    medium.close()
    index.close()


def test_a_demotion_that_a_snapshot_does_not_name_does_not_survive_a_restart(tmp_path: Path) -> None:
    """The snapshot has the order in which the index evicts, and no other."""
    options = disk_store.options_for(3 * 8192)
    path = tmp_path / "store"
    index, medium = disk_store.make_index(path, options), disk_store.make_medium(path, options)
    for key in (b"a", b"b", b"c"):
        assert disk_store.store(index, medium, key, DATA)
    index.demote([b"c"])
    medium.close()
    index.close()
    index, medium = disk_store.make_index(path, options), disk_store.make_medium(path, options)
    assert disk_store.store(index, medium, b"d", DATA)
    kept = [b"a", b"b"]
    assert [key for key in (b"a", b"b", b"c", b"d") if index.lookup(key) is LookupResult.HIT] == [*kept, b"d"]
    medium.close()
    index.close()
