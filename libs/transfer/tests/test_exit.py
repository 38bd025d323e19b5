"""An interpreter with queued jobs exits normally. Each test runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys

import patience
import pytest

TIMEOUT_S = patience.seconds(12.0)

QUEUE_JOBS = """
import builtins, sys
import patience
import numpy as np
from hybridkv.transfer import CopyRuns, CpuCopyEngine, JobId

num_bytes = 4 << 20
source, destination = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
engine = CpuCopyEngine()
for array in (source, destination):
    engine.register(array.ctypes.data, num_bytes, "array")
for number in range(1000):
    assert engine.submit(JobId(number), CopyRuns.of([(source.ctypes.data, destination.ctypes.data, num_bytes)]))
if sys.argv[1] == "kept":
    builtins.kept = source, destination
assert engine.wait([JobId(0)], patience.seconds(6.0))
"""

BLOCK = """
import threading
import patience
from hybridkv.transfer import CopyRuns, CpuCopyEngine, JobId, queued

queued.EXIT_TIMEOUT_S = 0.01
engine = CpuCopyEngine()
entered = threading.Event()

def block():
    entered.set()
    threading.Event().wait()

engine.submit(JobId(0), CopyRuns.empty(), before=block)
assert entered.wait(patience.seconds(6.0))
"""

FORK = """
import os, sys, threading
import patience
from hybridkv.transfer import CpuCopyEngine

engine = CpuCopyEngine()
held, done = threading.Event(), threading.Event()

def hold():  # the copy thread may hold the lock during a fork
    with engine._changed:
        held.set()
        done.wait()

holder = threading.Thread(target=hold)
holder.start()
assert held.wait(patience.seconds(6.0))
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
done.set()
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("memory", ["kept", "dropped"])
def test_an_interpreter_exits_with_jobs_queued(memory: str) -> None:
    for _ in range(5):
        finished = run(QUEUE_JOBS, memory)
        assert finished.returncode == 0, finished.stderr


def test_a_blocked_hook_does_not_delay_the_exit() -> None:
    finished = run(BLOCK)
    assert finished.returncode == 0
    assert "a copy job still runs" in finished.stderr


def test_a_forked_child_exits_without_the_threads_of_its_parent() -> None:
    finished = run(FORK)
    assert finished.returncode == 0, finished.stderr
