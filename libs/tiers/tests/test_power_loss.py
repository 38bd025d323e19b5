"""Loss of power costs no more than `fsync` allows, with io_uring and with threads.

A writer runs in a process with its writes and syncs logged at the kernel interface. Then power is lost at many places
in that log; each time possible contents of the disk are built, opened and loaded.
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
"""Per run."""
FIRST_SEED = int(os.environ.get("POWER_LOSS_SEED", "0"))
BACKENDS = ("io_uring", "threads")
Make: TypeAlias = Callable[[str, Fsync, bool, str], Run]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Run of a writer with a backend, a policy, room for all or not, and a fault. Made once."""

    @cache
    def make(backend: str, fsync: Fsync, is_roomy: bool, mistake: str) -> Run:
        watch = os.environ.get("HYBRIDKV_FILE_WATCH")
        if not watch:
            pytest.skip("HYBRIDKV_FILE_WATCH names no library; the build sets it")
        if backend == "io_uring" and not has_uring():
            pytest.skip("this kernel does not allow io_uring")
        path = tmp_path_factory.mktemp("run")
        (path / "top").mkdir()
        seed = 2 * FIRST_SEED + is_roomy
        store, log = str(path / "top" / "store"), str(path / "log")
        return Run(WriterOrders(store, log, seed, backend, fsync, is_roomy, mistake=mistake), Path(watch).absolute())

    return make


@pytest.mark.parametrize("is_roomy", [True, False])
@pytest.mark.parametrize("fsync", list(Fsync))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_of_power_costs_no_more_than_the_policy_allows(
    tmp_path: Path, written: Make, backend: str, fsync: Fsync, is_roomy: bool
) -> None:
    run = written(backend, fsync, is_roomy, "")
    run.lose_power_often(NUM_LOSSES, tmp_path)
    assert run.found["was there"]
    assert bool(run.found["had to be there"]) == (fsync is not Fsync.NONE)


@pytest.mark.parametrize("is_roomy", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_fsync_always_a_record_is_durable_before_its_commit(written: Make, backend: str, is_roomy: bool) -> None:
    """Checked at every commit of the log, not sampled."""
    run = written(backend, Fsync.ALWAYS, is_roomy, "")
    assert run.certain_at
    assert all(certain_at == time for time, certain_at in run.certain_at.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_fsync_interval_commits_become_durable_during_other_stores(written: Make, backend: str) -> None:
    """The writer waits for a sync, also for one that began a moment too early. So it holds for most commits, not for
    all.
    """
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
def test_a_missing_or_late_sync_is_detected(tmp_path: Path, written: Make, backend: str, mistake: str) -> None:
    """Control: detected in the log, and by the losses of power."""
    run = written(backend, Fsync.ALWAYS, True, mistake)
    assert any(certain_at != time for time, certain_at in run.certain_at.items())
    with pytest.raises(AssertionError, match="committed and is not found"):
        run.lose_power_after_each_commit(tmp_path)
