"""A fleet over one object store, with an intruder who writes to it, a host with read errors, store outages and kills.

Run it with `tools/bazel run //tests/soak:fleet -- --minutes 15`.

It runs twice: without any trouble, and with all of it. No engine may load wrong bytes, healthy engines must restore as
much as in the quiet run (except while the store refuses all requests), and processes must stay small and end in time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import IO

import patience

from hybridkv.tiers.object.format.epoch import encode_epoch
from hybridkv.tiers.object.format.manifest import MAX_PARTS, ManifestNode, ManifestPart, encode_manifest
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.names import (
    MANIFEST_EVERY,
    cache_name,
    epoch_name,
    manifest_name,
    namespace_of,
    pack_name,
    prefix_of,
)
from kits.tiers.played_s3 import PlayedS3, Request, Trouble, Zeros
from soak.fleet_engine import FINGERPRINT, NUM_PATHS, path_of

MIB = 1 << 20
NUM_HEALTHY = 3
SECRET = "the fleet's"
END_S = patience.seconds(3.0)
"""How long a process may take to end."""
START_S = patience.seconds(1.0)
"""How long a process takes to notice at its start that the store refuses its requests."""
MOST_GROWN_BYTES = 64 * MIB
MOST_POINTS = 2.0
"""How many percentage points fewer healthy engines may restore than in a quiet run."""
SETTLE_S = patience.seconds(0.3)
"""Effects within this time after the store refused all requests are attributed to that."""


@dataclass(slots=True)
class RunResult:
    """The result of a run.

    Args:
        asked: chunks that healthy engines requested while the store was available.
        restored: how many of these were restored.
        wrong: chunks with wrong bytes in any engine.
        most_grown: bytes by which a healthy process grew.
        longest_end_s: the longest time that a process took to end.
        tally: counts of actions by name.
    """

    asked: int = 0
    restored: int = 0
    wrong: int = 0
    most_grown: int = 0
    longest_end_s: float = 0.0
    tally: dict[str, int] = field(default_factory=dict)

    @property
    def percent(self) -> float:
        return 100.0 * self.restored / max(1, self.asked)

    def add(self, name: str, number: int = 1) -> None:
        self.tally[name] = self.tally.get(name, 0) + number


class Member:
    """A process of the fleet, and the counts that it reports."""

    def __init__(self, s3: PlayedS3, who: str, seed: int) -> None:
        self.who = who
        orders = json.dumps({"settings": s3.settings(who), "secret": SECRET, "seed": seed})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "soak.fleet_engine", orders], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.reported: dict[str, int] = {}
        assert self.process.stdout is not None
        threading.Thread(target=self._read_lines, args=(self.process.stdout,), daemon=True).start()

    def _read_lines(self, lines: IO[bytes]) -> None:
        for line in lines:
            self.reported = {**self.reported, **json.loads(line)}

    def end(self) -> float:
        """Terminate the process. Returns how long it took; more than the limit if it had to be killed."""
        began_s = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return END_S + 1.0
        return time.monotonic() - began_s

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Stranger:
    """Writes objects that no engine may trust. Knows the names of objects, as anyone who can list the bucket."""

    def __init__(self, s3: PlayedS3, random: Random) -> None:
        self._s3 = s3
        self._random = random
        self._cache = cache_name(SECRET.encode(), FINGERPRINT, MANIFEST_EVERY)
        self._namespace = namespace_of(self._cache, 0)

    def act(self) -> str:
        """Write one object, and return its kind."""
        keys = path_of(self._random.randrange(NUM_PATHS))
        key = self._random.choice(keys)
        name = manifest_name(self._namespace, prefix_of(key))
        kind = self._random.choice(["junk", "large", "empty", "unsealed", "mark", "far mark", "crafted"])
        objects = self._s3.objects
        with self._s3.lock:
            if kind == "junk":
                objects[name] = self._random.randbytes(20_000)
            elif kind == "large":
                objects[name] = Zeros(64 * MIB)
            elif kind == "empty":
                objects[name] = b""
            elif kind == "unsealed":
                objects[name] = encode_manifest(Seals(), name, 1, self._path(keys))
            elif kind == "mark":
                objects[epoch_name(self._cache)] = b""
                objects[f"{self._cache}/e/9999999999"] = b""
            elif kind == "far mark":  # with the secret
                mark = epoch_name(self._cache)
                objects[mark] = encode_epoch(Seals(SECRET.encode()), mark, int(time.time()) + 10**6)
            else:  # with the secret: a manifest of maximal size for a prefix that nobody requests
                name = manifest_name(self._namespace, self._random.randbytes(32))
                path = [ManifestNode(self._random.randbytes(32), [ManifestPart(b"f" * 16, "p", 0, 1)])] * (
                    MAX_PARTS // 8
                )
                objects[name] = encode_manifest(Seals(SECRET.encode()), name, 1, path)
        return kind

    def _path(self, keys: list[bytes]) -> Iterable[ManifestNode]:
        pack = pack_name(self._namespace, "stranger-1")
        return [ManifestNode(prefix_of(key), [ManifestPart(key[:16], pack, 0, 4096)]) for key in keys]


class Weather:
    """How the store treats requests."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.refuses = False
        self.is_full = False
        self.is_rough = False

    def trouble(self, request: Request) -> Trouble | None:
        if self.refuses:
            return Trouble(403)
        if self.is_full and request.method == "PUT":
            return Trouble(507)
        chance = self._random.random()
        if "/proof/" in request.name:
            return None
        if request.who == "sick" and request.method == "GET" and chance < 0.7:
            return Trouble(damage=lambda data: data[:-1] + bytes([data[-1] ^ 1]) if data else data)
        if self.is_rough and chance < 0.01:
            return self._random.choice([Trouble(503), Trouble(delay_s=0.2), Trouble(damage=lambda data: data[::-1])])
        return None


def run(seconds: float, seed: int, *, is_quiet: bool) -> RunResult:
    """Run the fleet for `seconds`."""
    random, found = Random(seed), RunResult()
    weather = Weather(Random(seed + 1))
    with PlayedS3(weather.trouble) as s3:
        names = [f"healthy{number}" for number in range(NUM_HEALTHY)]
        members = [Member(s3, who, random.getrandbits(32)) for who in names]
        if not is_quiet:
            members.append(Member(s3, "sick", random.getrandbits(32)))
            weather.is_rough = True
        try:
            _live(seconds, s3, members, weather, random, found, is_quiet=is_quiet)
        finally:
            for member in members:
                found.longest_end_s = max(found.longest_end_s, member.end())
                _take(member, found, {}, is_counted=False)
        found.add("objects", len(s3.objects))
        for method, number in s3.counts.items():
            found.add(f"requests: {method}", number)
    return found


def _live(
    seconds: float,
    s3: PlayedS3,
    members: list[Member],
    weather: Weather,
    random: Random,
    found: RunResult,
    *,
    is_quiet: bool,
) -> None:
    stranger = Stranger(s3, random)
    before: dict[Member, tuple[int, int]] = {}
    refused_s = -SETTLE_S
    began_s = time.monotonic()
    period_s = max(5 * SETTLE_S, min(60.0, seconds / 3))
    while (now_s := time.monotonic() - began_s) < seconds:
        time.sleep(0.5)
        # Chunks stored for the first time would not differ between the two runs.
        is_warm = now_s > min(30.0, seconds / 3)
        if not is_quiet:
            at_s = now_s % period_s
            weather.refuses = 0.5 * period_s < at_s < 0.5 * period_s + 2.0
            weather.is_full = 0.75 * period_s < at_s < 0.75 * period_s + 2.0
            if weather.refuses:
                refused_s = now_s
                found.add("half seconds of 403")
            if weather.is_full:
                found.add("half seconds of a full store")
            if random.random() < 0.25:
                found.add(f"stranger: {stranger.act()}")
            if random.random() < 0.5 / 15:
                place = random.randrange(len(members))
                members[place].kill()
                _take(members[place], found, before, is_counted=False)
                members[place] = Member(s3, members[place].who, random.getrandbits(32))
                found.add("kills")
        for member in members:
            _take(member, found, before, is_counted=is_warm and now_s - refused_s > SETTLE_S)
        for place, member in enumerate(members):
            if member.process.poll() is None:
                continue
            # An engine does not start if the store refuses its requests at the start.
            assert now_s - refused_s < SETTLE_S + START_S, f"{member.who} ended by itself: {member.process.returncode}"
            members[place] = Member(s3, member.who, random.getrandbits(32))
            found.add("starts that the store refused")


def _take(member: Member, found: RunResult, before: dict[Member, tuple[int, int]], *, is_counted: bool) -> None:
    """Add the counts that a member reported since the last call."""
    reported = member.reported
    asked, restored = reported.get("asked", 0), reported.get("restored", 0)
    last_asked, last_restored = before.get(member, (0, 0))
    before[member] = (asked, restored)
    if member.who != "sick":
        found.most_grown = max(found.most_grown, reported.get("grown", 0))
        if is_counted:
            found.asked += asked - last_asked
            found.restored += restored - last_restored
    found.add("wrong", reported.get("wrong", 0) - reported.get("wrong taken", 0))
    found.wrong += reported.get("wrong", 0) - reported.get("wrong taken", 0)
    member.reported = {**member.reported, "wrong taken": reported.get("wrong", 0)}


def complaints(quiet: RunResult, rough: RunResult) -> list[str]:
    """Violations in two runs, as messages."""
    lines = []
    if quiet.wrong or rough.wrong:
        lines.append(f"{quiet.wrong + rough.wrong} chunks with wrong bytes")
    if rough.percent < quiet.percent - MOST_POINTS:
        lines.append(f"healthy engines restored {rough.percent:.2f} %, in a quiet run {quiet.percent:.2f} %")
    if rough.most_grown > MOST_GROWN_BYTES:
        lines.append(f"a process grew by {rough.most_grown / MIB:.1f} MiB")
    if max(quiet.longest_end_s, rough.longest_end_s) > END_S:
        lines.append(f"a process took {rough.longest_end_s:.1f} s to end")
    return lines


def report(found: RunResult) -> str:
    """The result as lines of text."""
    lines = [f"{count:>12,}  {name}" for name, count in sorted(found.tally.items())]
    lines.append(f"{found.percent:>12.2f}  percent of {found.asked:,} chunks restored")
    lines.append(f"{found.most_grown / MIB:>12.1f}  MiB by which a process grew at most")
    lines.append(f"{found.longest_end_s:>12.2f}  s that a process took to end at most")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="duration of both runs together")
    parser.add_argument("--seed", type=int, default=1, help="seed of the actions and their times")
    arguments = parser.parse_args()
    seconds = 60 * arguments.minutes
    quiet = run(seconds / 4, arguments.seed, is_quiet=True)
    print("quiet", report(quiet), sep="\n", flush=True)
    rough = run(3 * seconds / 4, arguments.seed, is_quiet=False)
    print("rough", report(rough), sep="\n", flush=True)
    found = complaints(quiet, rough)
    print(*(found or ["no violations"]), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
