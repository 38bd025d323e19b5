"""Reads of another process's memory: NIXL compared with memcpy and a plain socket.

    tools/bazel run //bench:peer_transport -- [--rounds N] [--total-mib N] [--json FILE]

Measures wall time of the reading process: `--total-mib` MiB of ranges at random places of another process's memory are
read to random places of this process, for each size of a range. All variants alternate in each round, so that other
load of the machine affects all of them. GB/s is that of the best round. A ratio is the median over rounds of the time
of `memcpy`, or of `socket`, over that of the variant in the same round: larger is faster, 1 means equally fast. The
results also have processor seconds of both processes together for each GB: the cost of a read to an engine.

Variants: `memcpy` copies the same ranges within this process. `socket` is the minimum for two processes over loopback:
one blocking connection, `sendall` of one buffer, `recv_into` of another, without pieces or checks. `readv` is
`process_vm_readv`, the kernel's read of another process's memory, which UCX also uses. `nixl` is UCX with its default
choice (memory of the same host); `nixl tcp` is UCX limited to TCP.

Not measured: a network, several peers, verification of the read bytes.
"""

import argparse
import base64
import ctypes
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridkv.peers.transport import Ranges, Region, TransferDone, TransferPending, Transport
from hybridkv.peers.transport.nixl import NixlTransport

MAX_VECTORS = 16
"""Ranges in one call of `readv`, as in UCX."""
SIZES_KIB = (64, 256, 1024, 4096)
VARIANTS = ("socket", "readv", "nixl", "nixl tcp")

Read = Callable[[np.ndarray, np.ndarray, int], None]
"""Reads ranges of one size. Arguments: places in the other process, places in this process, size in bytes."""


def pattern(num_bytes: int) -> np.ndarray:
    return (np.arange(num_bytes, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(np.uint8)


def make(variant: str) -> Transport:
    if variant == "nixl tcp":
        os.environ["UCX_TLS"] = "tcp"
    return NixlTransport(f"bench-{uuid.uuid4()}")


def serve(variant: str, num_bytes: int) -> None:
    """The other process: prints the address of its memory, and runs until its standard input ends."""
    memory = pattern(num_bytes)
    if variant == "socket":
        with socket.create_server(("127.0.0.1", 0)) as server:
            print(server.getsockname()[1], flush=True)
            connection, _ = server.accept()
        while size := connection.recv(8):
            connection.sendall(memory[: int.from_bytes(size, "big")])
        return
    if variant == "readv":
        print(os.getpid(), memory.ctypes.data, flush=True)
        sys.stdin.read()
        return
    transport = make(variant)
    capability = transport.register([Region(memory.ctypes.data, num_bytes)])
    print(base64.b64encode(capability).decode(), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        # UCX over TCP needs this loop for progress, without pauses; its reads of memory do not need it.
        transport.progress()
        time.sleep(0 if variant == "nixl tcp" else 0.001)
    os._exit(0)


def read_socket(port: int, target: np.ndarray) -> Read:
    connection = socket.create_connection(("127.0.0.1", port))

    def read(there: np.ndarray, here: np.ndarray, size: int) -> None:
        left = len(there) * size
        connection.sendall(left.to_bytes(8, "big"))
        view = memoryview(target)[:left]
        while len(view):
            view = view[connection.recv_into(view) :]

    return read


def read_readv(pid: int, address: int, target: np.ndarray) -> Read:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t

    def vectors(places: np.ndarray, base: int, size: int) -> np.ndarray:
        return np.stack([places + base, np.full(len(places), size)], axis=1).astype(np.uint64)

    def read(there: np.ndarray, here: np.ndarray, size: int) -> None:
        ours, theirs = vectors(here, target.ctypes.data, size), vectors(there, address, size)
        for first in range(0, len(there), MAX_VECTORS):
            some, others = ours[first : first + MAX_VECTORS], theirs[first : first + MAX_VECTORS]
            places = [ctypes.c_void_p(each.ctypes.data) for each in (some, others)]
            count = ctypes.c_ulong(len(some))
            found = call(pid, places[0], count, places[1], count, ctypes.c_ulong(0))
            assert found == len(some) * size, os.strerror(ctypes.get_errno())

    return read


def read_transport(variant: str, capability: bytes, target: np.ndarray) -> Read:
    transport = make(variant)
    transport.register([Region(target.ctypes.data, target.nbytes)])
    remote = transport.attach(capability)
    assert isinstance(remote, int), remote

    def read(there: np.ndarray, here: np.ndarray, size: int) -> None:
        zeros = np.zeros(len(there), dtype=np.int64)
        ranges = Ranges(zeros, here.copy(), zeros.copy(), there.copy(), np.full(len(there), size, dtype=np.int64))
        transfer = transport.read(remote, ranges, 600.0)
        while isinstance(state := transport.poll(transfer), TransferPending):
            transport.wait(1.0)
        assert isinstance(state, TransferDone), state
        assert transport.release(transfer)

    return read


def read_memcpy(source: np.ndarray, target: np.ndarray) -> Read:
    def read(there: np.ndarray, here: np.ndarray, size: int) -> None:
        for begin, to in zip(there.tolist(), here.tolist(), strict=True):
            target[to : to + size] = source[begin : begin + size]

    return read


class Subject:
    """The two processes of one variant. The reader is a separate process, because UCX reads its settings only once."""

    def __init__(self, variant: str, num_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--read", variant, "--total-mib", str(num_bytes >> 20)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, size: int, seed: int) -> tuple[float, float]:
        """Reads once. Returns wall seconds and processor seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{size} {seed}\n")
        self.process.stdin.flush()
        wall_s, cpu_s = self.process.stdout.readline().split()
        return float(wall_s), float(cpu_s)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def busy_s(pids: Sequence[int]) -> float:
    """Processor seconds of all threads of these processes."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def reader(variant: str, num_bytes: int) -> None:
    """Reading process: reads for each line of its input, checks every byte, and prints the times."""
    source, target = pattern(num_bytes), np.zeros(num_bytes, dtype=np.uint8)
    other = None
    if variant == "memcpy":
        read = read_memcpy(source, target)
    else:
        command = [sys.executable, __file__, "--serve", variant, "--total-mib", str(num_bytes >> 20)]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        reply = other.stdout.readline().strip()
        if variant == "socket":
            read = read_socket(int(reply), target)
        elif variant == "readv":
            pid, address = reply.split()
            read = read_readv(int(pid), int(address), target)
        else:
            read = read_transport(variant, base64.b64decode(reply), target)
    pids = [os.getpid(), *([other.pid] if other is not None else [])]
    for line in sys.stdin:
        size, seed = (int(word) for word in line.split())
        count = num_bytes // size
        rng = np.random.default_rng(seed)
        there, here = (rng.permutation(count).astype(np.int64) * size for _ in range(2))
        began_s, cpu_s = time.perf_counter(), busy_s(pids)
        read(there, here, size)
        seconds, cpu_s = time.perf_counter() - began_s, busy_s(pids) - cpu_s
        if variant == "socket":
            assert np.array_equal(target, source)
        else:
            rows = target.reshape(count, size)
            assert np.array_equal(rows[here // size], source.reshape(count, size)[there // size])
        print(seconds, cpu_s, flush=True)
    if other is not None:
        other.kill()
    os._exit(0)


def measure(num_bytes: int, rounds: int, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    names = ["memcpy", "socket", *names]
    subjects = {name: Subject(name, num_bytes) for name in names}
    results: dict[str, Any] = {}
    for size in sizes:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for number in range(rounds + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                found[name].append(subjects[name].seconds(size, number))
        # The first round connects and touches the memory.
        found = {name: seconds[1:] for name, seconds in found.items()}
        label = f"{size >> 10} KiB"
        results[label] = {name: row(seconds, found, num_bytes) for name, seconds in found.items()}
        print(f"\nranges of {label}")
        for name, each in results[label].items():
            print(
                f"  {name:9} {each['gb_per_s']:6.2f} GB/s   {each['to_memcpy']:5.2f} of memcpy"
                f"   {each['to_socket']:5.2f} of socket   {each['cpu_s_per_gb']:5.2f} s of processors a GB",
                flush=True,
            )
    for subject in subjects.values():
        subject.close()
    return results


def row(
    seconds: list[tuple[float, float]], found: dict[str, list[tuple[float, float]]], num_bytes: int
) -> dict[str, float]:
    def ratio(name: str) -> float:
        return round(statistics.median(a / b for (a, _), (b, _) in zip(found[name], seconds, strict=True)), 3)

    return {
        "gb_per_s": round(num_bytes / min(wall_s for wall_s, _ in seconds) / 1e9, 2),
        "to_memcpy": ratio("memcpy"),
        "to_socket": ratio("socket"),
        "cpu_s_per_gb": round(statistics.median(cpu_s for _, cpu_s in seconds) / num_bytes * 1e9, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Reads of another process's memory.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS[1:], default=VARIANTS[1:])
    parser.add_argument("--kib", nargs="+", type=int, default=SIZES_KIB)
    parser.add_argument("--total-mib", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--read", choices=("memcpy", *VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_bytes = options.total_mib << 20
    if options.serve:
        serve(options.serve, num_bytes)
    elif options.read:
        reader(options.read, num_bytes)
    else:
        sizes = [each << 10 for each in options.kib]
        results = measure(num_bytes, options.rounds, options.variants, sizes)
        about = {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "rounds": options.rounds,
            "total_mib": options.total_mib,
        }
        if options.json:
            options.json.write_text(json.dumps({"about": about, "ranges": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
