"""A killed process that stores through the extension leaves its committed chunks, and otherwise only whole records.

Like test_disk_crash.py, where Python moves the bytes: committed chunks are found; chunks that every rank had written
whole may be found. Here the calls in flight end with the process at any point.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import disk_native_writer
import disk_store
from examples import examples

from hybridkv.tiers.disk import DiskMedium

NUM_KILLS = 6
MOST_COMMITS = 300
"""Reports before a kill. The pipe and the buffer of its reader hold fewer than 400 more, then the writer waits."""
PIPE_BYTES = 4096


def write_until_killed(path: Path, num_commits: int) -> list[str]:
    """Reports of the writer, which is killed after `num_commits` reported commits."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    program = [sys.executable, disk_native_writer.__file__, str(path)]
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True, pipesize=PIPE_BYTES) as writer:
        assert writer.stdout is not None
        words: list[str] = []
        for line in writer.stdout:
            words.append(line.strip())
            if sum(said.startswith("commit") for said in words) == num_commits:
                break
        os.kill(writer.pid, signal.SIGKILL)
        words += writer.stdout.read().splitlines()
    assert writer.returncode == -signal.SIGKILL, words[-5:]
    return words


def numbers(words: list[str], verb: str) -> set[int]:
    return {int(line.split()[1]) for line in words if line.startswith(f"{verb} ")}


def test_a_writer_killed_in_the_extension_leaves_its_committed_chunks(tmp_path: Path) -> None:
    chooser = random.Random(1)
    for kill in range(examples(NUM_KILLS, 3)):
        path = tmp_path / str(kill)
        words = write_until_killed(path, chooser.randrange(1, MOST_COMMITS))
        assert "end" not in words
        begun, committed = numbers(words, "begin"), numbers(words, "commit")
        assert committed < begun, "it was killed with stores in flight"
        found = offered(path)
        assert committed <= found <= begun


def offered(path: Path) -> set[int]:
    """Numbers of the records that an opening finds. Checks that each is whole on every rank."""
    options, ranks = disk_native_writer.OPTIONS, disk_native_writer.RANKS
    index = disk_store.make_index(path, options, **ranks)
    assert index.take_counts().evictions == 0
    found = {key: int(key.split()[1]) for key in disk_store.records_of(index)}
    for rank in range(disk_native_writer.NUM_RANKS):
        medium = DiskMedium(str(path), index.namespace, rank, options)
        for key, number in found.items():
            loaded = disk_store.load(index, medium, key)
            assert loaded is not None and loaded[0].failure is None, loaded
            assert loaded[1] == disk_native_writer.payload(number, rank)
        medium.close()
    index.close()
    return set(found.values())
