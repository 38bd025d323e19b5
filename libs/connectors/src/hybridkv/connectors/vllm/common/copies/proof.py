"""Proof at the start on a GPU that copies are correct beside the engine's compute. A failure refuses the start.

Random pages of every group are copied to the arena and back, with the copy engines and the lowering that serve requests
later. Compute runs on the engine's own stream at the same time: it writes blocks right before a store, reuses them
right after the store, and reads and zeroes blocks right before a load overwrites them. A missing fence, a page in the
wrong place and a missing byte all give wrong bytes. If compute ends before a copy is submitted, the fence is not
tested; then the copy is repeated with a longer delay, up to a limit. After a success, the blocks have their original
content again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from hybridkv.canonical import GroupPages
from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.copies.devices import Device, GpuDevice
from hybridkv.connectors.vllm.common.copies.kv_memory import KVMemory, zeros_in
from hybridkv.connectors.vllm.common.copies.lowering import JobLowering, RankMemory, SlotMemory
from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.tiers import SealedMemory, Slot
from hybridkv.transfer import CopyEngine, CopyRuns, Hook, JobId

if TYPE_CHECKING:
    # It imports vLLM, which the proof does not need.
    from hybridkv.connectors.vllm.common.copies.rank_worker import CopyPaths

logger = logging.getLogger("vllm.hybridkv.worker")

Bytes = npt.NDArray[np.uint8]

PROOF_BYTES = 64 << 20
"""Maximum bytes of a round over all groups, but at least one block of each group."""
PROOF_PAGES = 2048
"""Maximum pages of a round over all groups, but at least one block of each group."""
DELAY_CYCLES, MAX_DELAY_CYCLES = 8_000_000, 256_000_000
"""GPU cycles of delay before compute: about 4 ms at first, doubled while the delay is too short, up to about 130 ms."""
MEASURED_BYTES, MEASURED_JOBS = 64 << 20, 8
"""Maximum bytes, and maximum jobs, of a measurement of one group in one direction; at least one job."""
ROUNDS_S = 0.7
"""Seconds after which no further round starts. The proof takes less than 2 s, with the first round."""
CHECKSUM_BYTES, MAX_CHECKSUM_BYTES = 256 << 20, 1 << 30
"""Minimum and maximum bytes of the arena for the measurement of checksums. Between them: 4 times the last-level
cache."""
TIMEOUT_S = 30.0
"""Seconds after which a copy counts as failed."""
_KEY = b"copy proof"


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Measured copy rates.

    Args:
        num_pages: pages that were copied both ways and compared, summed over all rounds.
        page_sizes: sizes of these pages in bytes, ascending.
        store_bytes_per_s: rate of copies to the arena.
        load_bytes_per_s: rate of copies from the arena.
        checksum_bytes_per_s: rate of checksums of chunks in the arena that are in no CPU cache, measured without
            concurrent copies. Loads and stores compute checksums beside the copies of other jobs, so a rate below the
            link's limits both.
        seconds: duration of the proof.
        untested_fences: "loads", "stores": directions with an untested fence, because compute always ended before the
            copy was submitted.
    """

    num_pages: int
    page_sizes: tuple[int, ...]
    store_bytes_per_s: float
    load_bytes_per_s: float
    checksum_bytes_per_s: float
    seconds: float
    untested_fences: tuple[str, ...]


def prove_copies_at_start(
    memory: KVMemory, arena: SealedMemory, paths: CopyPaths, device: Device, chunk_sizes: Sequence[int] = ()
) -> CopyRates | None:
    """Proves the copies of a GPU, logs their rates and returns the rates. On a CPU does nothing and returns None.

    Args:
        memory: the engine's memory, registered with the copy engines.
        arena: pinned memory, registered with the copy engines.
        paths: the copy engines.
        device: device of this worker.
        chunk_sizes: see `prove_copies`.

    Raises:
        ConfigurationError: see `prove_copies`.
    """
    if not isinstance(device, GpuDevice):
        return None
    sides = RankMemory(memory.pages, memory.cut, zeros_in(memory.zeros), arena)
    seed = secrets.randbits(32)
    logger.info("proving copies of this GPU, seed %d", seed)
    rates = prove_copies(sides, memory.storages, paths, device, np.random.default_rng(seed), chunk_sizes)
    logger.info(
        "copies of this GPU: stores %.1f GB/s, loads %.1f GB/s, checksums %.1f GB/s; %d pages (sizes in bytes: "
        "%s) went both ways beside compute, and every byte and digest was right (%.2f s)%s",
        rates.store_bytes_per_s / 1e9,
        rates.load_bytes_per_s / 1e9,
        rates.checksum_bytes_per_s / 1e9,
        rates.num_pages,
        ", ".join(map(str, rates.page_sizes)),
        rates.seconds,
        f"; fences of {' and '.join(rates.untested_fences)} were not tried: compute was too short"
        if rates.untested_fences
        else "",
    )
    return rates


def prove_copies(
    memory: RankMemory[SealedMemory],
    tensors: Sequence[Any],
    paths: CopyPaths,
    gpu: GpuDevice,
    random: np.random.Generator,
    chunk_sizes: Sequence[int] = (),
) -> CopyRates:
    """Copies pages both ways and compares them. No other thread may use the memory during the call.

    Args:
        memory: both sides of the copies, registered with the copy engines.
        tensors: tensors of bytes that contain the pages.
        paths: the copy engines.
        gpu: GPU for compute.
        random: source of random blocks and bytes.
        chunk_sizes: bytes of the chunks for the measurement of checksums: sizes that loads verify. Empty: the bytes of
            one block of each group.

    Raises:
        ConfigurationError: a byte or a digest differs, a copy failed, or the arena is smaller than a block.
    """
    import torch

    began_s = paths.clock()
    # Only whole blocks: chunks that cut blocks use the same copies.
    whole = RankMemory(memory.pages, {}, memory.zeros, memory.arena)
    proof = _Proof(JobLowering(whole), memory.arena, paths, gpu)
    num_pages, sizes = 0, set[int]()
    for number in itertools.count():
        if number and paths.clock() - began_s >= ROUNDS_S:
            break
        for group_index in memory.pages:
            sizes_of_group = proof.prove_group(_blocks_that_fit(memory, group_index, tensors, random))
            num_pages += len(sizes_of_group)
            sizes.update(sizes_of_group)
    torch.cuda.empty_cache()
    proof.measure_checksums(chunk_sizes or [pages.block_bytes for pages in memory.pages.values()])
    seconds = paths.clock() - began_s
    page_sizes, untested = tuple(sorted(sizes)), tuple(sorted(proof.untested_fences))
    rates = proof.stores.bytes_per_s, proof.loads.bytes_per_s, proof.checksums.bytes_per_s
    return CopyRates(num_pages, page_sizes, *rates, seconds, untested)


@dataclass(slots=True)
class _ByteRate:
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds else 0.0


class _Blocks:
    """Random blocks of one group: their pages as tensors on the device, buffers for pages, and a slot in the arena."""

    def __init__(
        self, pages: GroupPages, group_index: int, tensors: Sequence[Any], random: np.random.Generator, number: int
    ) -> None:
        import torch

        # Block 0 is the engine's null block.
        first = min(1, pages.num_blocks - 1)
        block_ids = (first + random.permutation(pages.num_blocks - first)[:number]).tolist()
        addresses, sizes = pages.addresses(block_ids)
        self.group_index = group_index
        self.sizes: list[int] = sizes.tolist()
        self.offsets: list[int] = pages.chunk_offsets(0, number, number).tolist()
        self.block_ids = tuple(block_ids)
        self.slot = Slot(((0, number * pages.block_bytes),))
        self.copies = CopyTable.of([ChunkCopy(group_index, _KEY, self.slot, 0, number, self.block_ids)])
        self._views = [
            _view(tensors, address, size) for address, size in zip(addresses.tolist(), self.sizes, strict=True)
        ]
        self.is_page = np.zeros(self.slot.num_bytes, dtype=bool)
        """For each byte of the slot, whether it belongs to a page; other bytes are padding."""
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            self.is_page[offset : offset + size] = True
        self.content = random.integers(1, 256, self.slot.num_bytes, dtype=np.uint8)
        """Bytes of the slot: random nonzero bytes in pages, and zeros between them."""
        self.content[~self.is_page] = 0
        buffers = torch.zeros((5, self.slot.num_bytes), dtype=torch.uint8, device=self._views[0].device)
        self.kept, self.fresh, self.other, self.before, self.after = buffers
        """Buffers on the device: `kept`: original pages; `fresh`: `content`; `other`: inverted `content`; `before` and
        `after`: pages that compute reads before and after a load."""
        self.fresh.copy_(torch.from_numpy(self.content))
        self.other.copy_(torch.from_numpy(~self.content))

    def writes(self, buffer: Any) -> Callable[[], None]:
        """Returns a function that launches compute: it copies `buffer` to all pages."""
        import torch

        parts = self._parts(buffer)
        return lambda: torch._foreach_copy_(self._views, parts)

    def reads(self, buffer: Any) -> Callable[[], None]:
        """Returns a function that launches compute: it copies all pages to `buffer`."""
        import torch

        parts = self._parts(buffer)
        return lambda: torch._foreach_copy_(parts, self._views)

    def zero(self) -> None:
        import torch

        torch._foreach_zero_(self._views)

    def page_at(self, offset: int) -> str:
        """Name of the page that contains a byte of the slot."""
        page = int(np.searchsorted(self.offsets, offset, side="right")) - 1
        pages_of_a_block = len(self.sizes) // len(self.block_ids)
        block_id = self.block_ids[page // pages_of_a_block]
        return f"byte {offset - self.offsets[page]} of a page of {self.sizes[page]} bytes of block {block_id}"

    def _parts(self, buffer: Any) -> list[Any]:
        return [buffer[offset : offset + size] for offset, size in zip(self.offsets, self.sizes, strict=True)]


def _blocks_that_fit(
    memory: RankMemory[SlotMemory], group_index: int, tensors: Sequence[Any], random: np.random.Generator
) -> _Blocks:
    """Random blocks of one group: as many as the limits and the free memory of the device allow, at least one.

    Raises:
        ConfigurationError: the arena is smaller than a block.
    """
    import torch

    pages = memory.pages[group_index]
    share_bytes = min(PROOF_BYTES // len(memory.pages), memory.arena.capacity_bytes)
    share_pages = PROOF_PAGES // len(memory.pages)
    most = min(share_bytes // pages.block_bytes, share_pages // len(pages.regions), pages.num_blocks - 1)
    number = max(1, most)
    if number * pages.block_bytes > memory.arena.capacity_bytes:
        got = f"{memory.arena.capacity_bytes} bytes on this rank"
        raise ConfigurationError("capacity", f"room for a block of {pages.block_bytes} bytes", got, "give it more")
    while number > 1:
        with contextlib.suppress(torch.OutOfMemoryError):
            return _Blocks(pages, group_index, tensors, random, number)
        number //= 2
    return _Blocks(pages, group_index, tensors, random, number)


class _Proof:
    def __init__(self, lowering: JobLowering, arena: SealedMemory, paths: CopyPaths, gpu: GpuDevice) -> None:
        self._lowering = lowering
        self._arena = arena
        self._paths = paths
        self._gpu = gpu
        self._job_ids = itertools.count(1)
        self._delay_cycles = DELAY_CYCLES
        self._was_pending = False
        self.untested_fences = {"stores", "loads"}
        self.stores, self.loads, self.checksums = _ByteRate(), _ByteRate(), _ByteRate()

    def prove_group(self, blocks: _Blocks) -> list[int]:
        """Copies blocks of a group both ways, compares them, and measures the rates. Returns the sizes of the pages."""
        self._gpu.launch(blocks.reads(blocks.kept))
        self._until_pending("stores", lambda: self._store(blocks))
        self._until_pending("loads", lambda: self._load(blocks))
        self._arena.discard(blocks.slot)
        self._measure("store", blocks, self._paths.stores, self._stored(blocks), self.stores)
        self._measure("load", blocks, self._paths.loads, self._loaded(blocks), self.loads)
        self._gpu.launch(blocks.writes(blocks.kept))
        self._gpu.synchronize()
        return blocks.sizes

    def _until_pending(self, name: str, copy: Callable[[], None]) -> None:
        """Repeats a copy with longer delays while compute ends before the copy is submitted."""
        while True:
            copy()
            if self._was_pending:
                self.untested_fences.discard(name)
                return
            if self._delay_cycles >= MAX_DELAY_CYCLES:
                return
            self._delay_cycles *= 2

    def _store(self, blocks: _Blocks) -> None:
        """Stores blocks. Delayed compute writes these blocks before the store. Other compute zeroes these blocks right
        after the store."""
        content = blocks.content
        [view] = self._arena.views(blocks.slot)
        view[:] = (~content).tobytes()  # each byte differs, so the copy must write each byte
        write = blocks.writes(blocks.fresh)
        self._gpu.launch_delay(self._delay_cycles)
        self._gpu.launch(write)
        is_done = self._gpu.mark()
        self._copy(
            "store",
            blocks,
            self._paths.stores,
            self._stored(blocks),
            before=lambda: self._check_pending(is_done),
            after=lambda: self._seal(blocks),
        )
        self._gpu.launch(blocks.zero)
        stored = np.frombuffer(b"".join(self._arena.views(blocks.slot)), dtype=np.uint8)
        self._compare("store", blocks, stored, content)
        if self._arena.sealed_checksum(_KEY, blocks.slot) != xxhash.xxh3_128_digest(content.tobytes()):
            raise _refusal("store", blocks, "the digest is not that of the bytes")

    def _load(self, blocks: _Blocks) -> None:
        """Loads into blocks. Delayed compute reads and zeroes these blocks before the load, and reads them right after
        the load."""
        content = blocks.content
        read_before, read_after = blocks.reads(blocks.before), blocks.reads(blocks.after)
        self._gpu.launch(blocks.writes(blocks.other))
        self._gpu.launch_delay(self._delay_cycles)
        self._gpu.launch(read_before)
        self._gpu.launch(blocks.zero)
        is_done = self._gpu.mark()
        self._copy(
            "load",
            blocks,
            self._paths.loads,
            self._loaded(blocks),
            before=lambda: self._check(blocks) or self._check_pending(is_done),
        )
        self._gpu.launch(read_after)
        self._gpu.synchronize()
        self._compare("load", blocks, blocks.before.cpu().numpy(), np.where(blocks.is_page, ~content, 0))
        self._compare("load", blocks, blocks.after.cpu().numpy(), content)

    def _check_pending(self, is_done: Callable[[], bool]) -> str | None:
        """Hook before the first byte of a copy: records whether compute is still pending."""
        self._was_pending = not is_done()
        return None

    def _measure(
        self, name: str, blocks: _Blocks, engine: CopyEngine, runs: Callable[[], CopyRuns], rate: _ByteRate
    ) -> None:
        self._gpu.synchronize()
        num_bytes = blocks.slot.num_bytes
        number = max(1, min(MEASURED_BYTES // num_bytes, MEASURED_JOBS))
        began_s = self._paths.clock()
        self._copy(name, blocks, engine, runs, number=number)
        rate.seconds += self._paths.clock() - began_s
        rate.num_bytes += number * num_bytes

    def measure_checksums(self, chunk_sizes: Sequence[int]) -> None:
        """Seals chunks of these sizes, in turn, over a part of the arena, and measures the time to check them.

        The part is larger than the CPU caches, and the check begins at the chunk that was sealed first. So no checked
        byte is in a cache. A smaller arena is measured as a whole: its loads read from the cache too.
        """
        end = min(self._arena.capacity_bytes, _bytes_beyond_caches())
        chunks: list[tuple[bytes, Slot]] = []
        offset = 0
        for chunk_bytes in itertools.cycle(chunk_sizes):
            if offset + chunk_bytes > end and chunks:
                break
            size = min(chunk_bytes, end - offset)
            chunks.append((_KEY, Slot(((offset, size),))))
            offset += size
        self._arena.seal_all(chunks)
        began_s = self._paths.clock()
        failures = self._arena.check_all(chunks)
        self.checksums.seconds += self._paths.clock() - began_s
        self.checksums.num_bytes += offset
        for _, slot in chunks:
            self._arena.discard(slot)
        for failure in failures:
            if failure is not None:
                raise _refusal("checksum", None, str(failure))

    def _stored(self, blocks: _Blocks) -> Callable[[], CopyRuns]:
        return lambda: self._lowering.store(blocks.copies).runs

    def _loaded(self, blocks: _Blocks) -> Callable[[], CopyRuns]:
        return lambda: self._lowering.load(blocks.copies)

    def _copy(
        self,
        name: str,
        blocks: _Blocks,
        engine: CopyEngine,
        runs: Callable[[], CopyRuns],
        before: Hook | None = None,
        after: Hook | None = None,
        number: int = 1,
    ) -> None:
        job_ids = [JobId(next(self._job_ids)) for _ in range(number)]
        try:
            is_taken = all(engine.submit(job_id, runs, before, after) for job_id in job_ids)
        except Exception as error:  # of an engine that copies within `submit`
            raise _refusal(name, blocks, f"{type(error).__name__}: {error}") from error
        if not is_taken:
            raise _refusal(name, blocks, "the engine takes no more jobs")
        if not engine.wait(job_ids, TIMEOUT_S):
            raise _refusal(name, blocks, f"it did not end in {TIMEOUT_S:.0f} s")
        for result in engine.poll():
            if result.failure is not None:
                raise _refusal(name, blocks, result.failure)

    def _seal(self, blocks: _Blocks) -> str | None:
        [failure] = self._arena.seal_all([(_KEY, blocks.slot)])
        return None if failure is None else str(failure)

    def _check(self, blocks: _Blocks) -> str | None:
        [failure] = self._arena.check_all([(_KEY, blocks.slot)])
        return None if failure is None else str(failure)

    def _compare(self, name: str, blocks: _Blocks, found: Bytes, expected: Bytes) -> None:
        differs = np.flatnonzero(found != expected)
        if len(differs):
            where = blocks.page_at(int(differs[0]))
            raise _refusal(name, blocks, f"{len(differs)} of {len(expected)} bytes differ, the first is {where}")


def _view(tensors: Sequence[Any], address: int, num_bytes: int) -> Any:
    for tensor in tensors:
        offset = address - tensor.data_ptr()
        if offset >= 0 and offset + num_bytes <= tensor.nbytes:
            return tensor[offset : offset + num_bytes]
    raise ValueError(f"[{address:#x}, +{num_bytes}) lies in none of the tensors")


def _bytes_beyond_caches() -> int:
    """Bytes of a memory range so large that after one pass over it, its first bytes are in no CPU cache."""
    try:
        cache_bytes = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):  # the system does not report the size
        cache_bytes = 0
    return min(max(4 * cache_bytes, CHECKSUM_BYTES), MAX_CHECKSUM_BYTES)


def _refusal(name: str, blocks: _Blocks | None, what: str) -> ConfigurationError:
    group = "" if blocks is None else f" of group {blocks.group_index}"
    return ConfigurationError(
        f"{ROOT}.copies",
        "copies that keep every byte",
        f"a {name}{group} at the start: {what}",
        "run without this connector on this machine, and report vLLM's version, the GPU and its driver",
    )
