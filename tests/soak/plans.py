"""Plans drawn from a seed for a world and for each life in it: sizes, options, faults, and the end.

A world is one directory with the lives of the engines that open it one after the other. All random choices are drawn
here or from a life's own generator, so that a world can be rerun from its seed.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import NamedTuple

import patience

from hybridkv.hashing import Fingerprint, GroupFingerprint, LayerFingerprint
from hybridkv.tiers.disk import DiskOptions, Fsync
from soak.content import Group, Kind

GRANULE_BYTES = 4096
MIB = 1 << 20
CLOSE_S = patience.seconds(10.0)
"""How long an end waits for file work. A watchdog ends the process before this time."""


class End(StrEnum):
    """How a life ends."""

    CLEAN = "clean"
    KILL_IN_CALL = "kill in a call"
    """SIGKILL before, during or after a system call."""
    KILL = "kill"
    """SIGKILL from outside, at any instruction."""
    POWER = "power loss"


class Mode(StrEnum):
    """Which lives a run has."""

    SOAK = "soak"
    """All kinds of ends, and faults."""
    KILLS = "kills"
    """Only kills."""
    LOSSES = "losses"
    """Only losses of power."""


class WorldPlan(NamedTuple):
    """The parameters shared by all engines on a directory."""

    seed: str
    groups: tuple[Group, ...]
    num_ranks: int
    longest_prompt: int
    num_lives: int
    is_small_disk: bool
    """Whether the file system has less space than the engines assume."""
    has_damage: bool
    """Whether files are damaged from outside. Otherwise no damage may ever be found."""

    @property
    def fingerprint(self) -> Fingerprint:
        layer = LayerFingerprint(name="0", page_bytes=8, facts={"dtype": "u8"})
        groups = [GroupFingerprint(kind=str(group.kind), block_tokens=16, layers=(layer,)) for group in self.groups]
        return Fingerprint(
            facts={"model": f"soak {self.seed}"},
            chunk_tokens=128,
            hash_algorithm="sha256",
            tensor_parallel_size=self.num_ranks,
            groups=tuple(groups),
        )


class LifePlan(NamedTuple):
    """The parameters of one engine on the directory."""

    seed: str
    number: int
    options: DiskOptions
    near_bytes: int
    """Host memory of one rank."""
    is_native: bool
    """Whether the extension moves the bytes."""
    is_threaded: bool
    """Whether the index does its file work on its own thread, with the real clock."""
    has_faults: bool
    is_read_only_at_first: bool
    end: End
    num_steps: int
    """Steps until a clean end; the maximum for every life."""
    end_at: int
    """The system call, or the line of the log, at which another kind of end happens."""


def draw_world(seed: str, mode: Mode) -> WorldPlan:
    random = Random(f"world {seed}")
    sizes = [1000, 4096, 9000, 12288, 30_000]
    kinds = random.choice(
        [
            (Kind.FULL,),
            (Kind.FULL, Kind.RECURRENT),
            (Kind.FULL, Kind.WINDOW),
            (Kind.FULL, Kind.WINDOW, Kind.RECURRENT),
            (Kind.WINDOW, Kind.RECURRENT),
        ]
    )
    groups = tuple(
        Group(number, kind, random.choice(sizes), random.randint(1, 3) if kind is Kind.WINDOW else 0)
        for number, kind in enumerate(kinds)
    )
    return WorldPlan(
        seed=seed,
        groups=groups,
        num_ranks=random.choice([1, 1, 2, 3]),
        longest_prompt=random.choice([4, 8, 12]),
        num_lives=random.randint(4, 12),
        is_small_disk=mode is Mode.SOAK and random.random() < 0.25,
        has_damage=mode is Mode.SOAK and random.random() < 0.4,
    )


def draw_life(world: WorldPlan, number: int, mode: Mode) -> LifePlan:
    random = Random(f"life {world.seed} {number}")
    ends = {
        Mode.SOAK: [End.CLEAN, End.CLEAN, End.KILL_IN_CALL, End.KILL, End.POWER],
        Mode.KILLS: [End.KILL_IN_CALL, End.KILL],
        Mode.LOSSES: [End.POWER],
    }
    end = random.choice([end for end in ends[mode] if end is not End.POWER or not world.is_small_disk])
    # Only the Python implementation can count calls and delay their effects.
    is_native = end in (End.CLEAN, End.KILL) and random.random() < 0.6
    steps = random.choice([30, 100, 300]) if mode is Mode.SOAK else random.choice([20, 40, 80])
    largest = max(group.chunk_bytes for group in world.groups)
    return LifePlan(
        seed=f"{world.seed} {number}",
        number=number,
        options=_draw_options(random, world, mode, end),
        near_bytes=random.choice([12, 40, 120]) * (largest + GRANULE_BYTES),
        is_native=is_native,
        is_threaded=random.random() < 0.6,
        has_faults=mode is Mode.SOAK and end is not End.POWER,
        is_read_only_at_first=world.is_small_disk and number > 0 and random.random() < 0.3,
        end=end,
        num_steps=steps,
        end_at=int(random.choice([40, 400, 2000]) * random.random()) + 1,
    )


def _draw_options(random: Random, world: WorldPlan, mode: Mode, end: End) -> DiskOptions:
    num_segments = random.choice([6, 10, 24])
    segment_bytes = random.choice([160, 256, 512]) * 1024
    fsyncs = list(Fsync)
    if end is End.POWER:
        # Only `always` promises durability for every chunk.
        fsyncs += [Fsync.ALWAYS] * (9 if mode is Mode.LOSSES else 3)
    return DiskOptions(
        capacity_bytes=num_segments * segment_bytes * world.num_ranks + MIB,
        segment_bytes=segment_bytes,
        max_records=2000,
        max_quarantined=random.choice([64, 512]),
        snapshot_interval_s=random.choice([0.2, 2.0, 60.0]),
        changes_interval_s=random.choice([0.05, 0.5]),
        retry_interval_s=random.choice([0.1, 2.0]),
        fsync=random.choice(fsyncs),
        fsync_interval_s=random.choice([0.1, 1.0]),
        direct=random.choice(["auto", False]),
        max_in_flight=random.choice([1, 2]),
        max_queued=random.choice([32, 4096]),
        batch_bytes=random.choice([1 << 16, 1 << 20]),
        max_open_files=random.choice([4, 64]),
        close_timeout_s=CLOSE_S,
    )
