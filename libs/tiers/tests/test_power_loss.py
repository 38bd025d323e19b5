"""A loss of power takes what `fsync` says and no more, whoever writes: io_uring or threads.

A writer runs in a process whose writes and syncs are watched where the kernel gets them. Then power is lost in the log
of it, in many places, and each time something that a disk may hold then is opened and loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest
from power_loss_check import Run
from power_loss_writer import WriterOrders

from hybridkv.native import has_uring
from hybridkv.tiers.disk import Fsync

NUM_LOSSES = int(os.environ.get("POWER_LOSSES", "15"))
"""Of each run."""
FIRST_SEED = int(os.environ.get("POWER_LOSS_SEED", "0"))
BACKENDS = ("io_uring", "threads")
Make: TypeAlias = Callable[[str, Fsync, bool, str], Run]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The run of a writer: by a backend, with a policy, with room for all or not, with a mistake. Made once."""

    @cache
    def make(backend: str, fsync: Fsync, is_roomy: bool, mistake: str) -> Run:
        watch = os.environ.get("HYBRIDKV_FILE_WATCH")
        if not watch:
            pytest.skip("HYBRIDKV_FILE_WATCH names no library to watch with; the build names it")
        if backend == "io_uring" and not has_uring():
            pytest.skip("this kernel gives us no io_uring")
        path = tmp_path_factory.mktemp("run")
        (path / "top").mkdir()
        seed = 2 * FIRST_SEED + is_roomy
        store, log = str(path / "top" / "store"), str(path / "log")
        return Run(WriterOrders(store, log, seed, backend, fsync, is_roomy, mistake=mistake), Path(watch).absolute())

    return make


@pytest.mark.parametrize("is_roomy", [True, False])
@pytest.mark.parametrize("fsync", list(Fsync))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_of_power_takes_no_more_than_the_policy_says(
    tmp_path: Path, written: Make, backend: str, fsync: Fsync, is_roomy: bool
) -> None:
    run = written(backend, fsync, is_roomy, "")
    run.lose_power_often(NUM_LOSSES, tmp_path)
    assert run.found["was there"]
    assert bool(run.found["had to be there"]) == (fsync is not Fsync.NONE)


@pytest.mark.parametrize("is_roomy", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_always_a_record_is_certain_before_it_is_committed(written: Make, backend: str, is_roomy: bool) -> None:
    """At every commit of the log, without chance."""
    run = written(backend, Fsync.ALWAYS, is_roomy, "")
    assert run.certain_at
    assert all(certain_at == time for time, certain_at in run.certain_at.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_interval_what_was_committed_becomes_certain_while_others_are_stored(written: Make, backend: str) -> None:
    """The writer pauses for a sync; one that had begun a moment too early is a pause too. So it is not every time."""
    assert written(backend, Fsync.INTERVAL, True, "").share_certain("settle") > 0.5
    assert written(backend, Fsync.INTERVAL, True, "nothing is synced every so often").share_certain("settle") < 0.5


@pytest.mark.parametrize(
    ("backend", "mistake"),
    [
        ("io_uring", "stores are not synced"),
        ("io_uring", "stores end before they are synced"),
        ("io_uring", "the device forgets"),
        ("threads", "stores end before they are synced"),
        ("threads", "stores are not synced"),
    ],
)
def test_a_sync_that_is_missing_or_late_is_found(tmp_path: Path, written: Make, backend: str, mistake: str) -> None:
    """The control: in the log, and by the losses."""
    run = written(backend, Fsync.ALWAYS, True, mistake)
    assert any(certain_at != time for time, certain_at in run.certain_at.items())
    with pytest.raises(AssertionError, match="committed and is not there"):
        run.lose_power_behind_each_commit(tmp_path)
