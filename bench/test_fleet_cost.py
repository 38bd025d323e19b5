"""Compares the simulated fleet with the real tier on a directory, and checks its figures on small traces."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_cost import burst, cost_of, parse, run_burst, sample
from fleet_model import FleetSettings, Prompt, SimulatedEngine, SimulatedStore, TimedRequest, run_fleet, simulated_index

from hybridkv.cli.simulation.traces import TraceRequest, chained
from hybridkv.tiers import Slot
from hybridkv.tiers.contract import Ticket
from hybridkv.tiers.object import ObjectMedium, ObjectOptions, StoreLocation, open_index, open_medium
from hybridkv.tiers.object.directory_store import DirectoryStore
from hybridkv.tiers.object.names import ObjectKind, parse_name

SETTINGS = FleetSettings(3, cascades_all=True, full_bytes=4096, window_bytes=2048, ram_bytes=1 << 24)
OPTIONS = ObjectOptions(pack_bytes=20_000, missing_s=600.0)
TIMEOUT_S = 60.0


def prompts(*contents: str) -> list[TraceRequest]:
    """Requests with one chunk for each letter."""
    return list(chained("letters", 128, [(128 * len(each) + 1, each) for each in contents]).requests)


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)


class RealEngine(SimulatedEngine):
    """`SimulatedEngine` on the real tier: moves bytes, and waits for all answers and manifests."""

    def __init__(self, directory: Path) -> None:
        location = StoreLocation(f"file://{directory}")
        index = open_index(location, bytes(32), 1, OPTIONS, time.monotonic)
        super().__init__(SETTINGS, SimulatedStore(), time.monotonic, index)
        self._medium: ObjectMedium = open_medium(location, 0, OPTIONS)
        self._tickets = 0
        self._reserved: dict[bytes, Slot] = {}
        index.reserve = self._reserve(index.reserve)  # type: ignore[method-assign]
        index.pin_all = self._pin_all(index.pin_all)  # type: ignore[method-assign]

    def _reserve(self, reserve: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(key: bytes, *arguments: Any) -> Any:
            slot = reserve(key, *arguments)
            if isinstance(slot, Slot):
                self._reserved[key] = slot
            return slot

        return recorded

    def _pin_all(self, pin_all: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(keys: list[bytes]) -> Any:
            slots = pin_all(keys)
            for key, slot in zip(keys, slots, strict=True):
                self._medium.load(self._ticket(), key, slot, [bytearray(slot.num_bytes)])
            self._end_moves(len(keys))
            return slots

        return loaded

    def _ticket(self) -> Ticket:
        self._tickets += 1
        return Ticket(self._tickets)

    def _end_moves(self, number: int) -> None:
        self._medium.flush()
        assert self._medium.drain(TIMEOUT_S)
        ended = self._medium.poll()
        assert len(ended) == number and all(completion.failure is None for completion in ended)

    def begin(self, prompt: Prompt) -> tuple[int, list[bytes]]:
        end = (prompt.num_tokens - 1) // SETTINGS.chunk_tokens
        wanted = [key for key, _ in prompt.chunks(0, end) if not self.ram.leading([key])]
        self.index.start_lookup(wanted, time.monotonic() + TIMEOUT_S)
        wait_until(lambda: not self.index.any_pending(wanted))
        return super().begin(prompt)

    def commit(self, keys: list[bytes]) -> None:  # type: ignore[override]
        for key in keys:
            self._medium.store(self._ticket(), key, self._reserved[key], [bytes(self._reserved[key].num_bytes)])
        self._end_moves(len(keys))
        super().commit(keys)
        client: Any = self.index._client
        done: list[None] = []
        client._loop.post(lambda: done.append(None))
        wait_until(lambda: bool(done) and len(client._loop._tasks) == 1)  # one task stays: it follows the epochs

    def close(self) -> None:
        self._medium.close()
        self.index.close()


def play(engines: list[SimulatedEngine]) -> None:
    """Serves a prompt, the same prompt on another engine, a longer prompt, a prompt on two engines concurrently, and a
    prompt that branches early.
    """
    first, other, longer, both, parted = (
        Prompt(each, SETTINGS, 1)
        for each in prompts("abcdefghijklmnopqrst", "abcdefghij", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKL", "abXYZ")
    )

    def serve(engine: SimulatedEngine, prompt: Prompt) -> None:
        resumed, met = engine.begin(prompt)
        for stop in range(resumed + 8, len(prompt.full) + 8, 8):
            engine.commit(engine.store(prompt, stop - 8, stop, met if stop == resumed + 8 else ()))

    serve(engines[0], first)
    serve(engines[1], other)
    serve(engines[2], longer)
    serve(engines[1], longer)
    found = [engine.begin(both) for engine in engines[:2]]
    sent = [engine.store(both, 0, 12, met) for engine, (_, met) in zip(engines[:2], found, strict=True)]
    for engine, keys in zip(engines[:2], sent, strict=True):
        engine.commit(keys)
    serve(engines[1], parted)
    serve(engines[0], parted)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests to directories, by operation and kind of object; "check pack" are reads of one byte."""
    counted: Counter[str] = Counter()
    names = {ObjectKind.PACK: "pack", ObjectKind.MANIFEST: "manifest"}

    def patched(operation: str) -> None:
        original = getattr(DirectoryStore, operation)

        def call(store: DirectoryStore, path: str, *arguments: Any, **options: Any) -> Any:
            is_check = options.get("options") == {"range": (0, 1)}
            counted[f"{'check' if is_check else operation} {names.get(parse_name(path).kind, 'other')}"] += 1
            return original(store, path, *arguments, **options)

        monkeypatch.setattr(DirectoryStore, operation, call)

    patched("put")
    patched("get")
    return counted


def test_the_counts_equal_those_of_the_real_tier(tmp_path: Path, requests: Counter[str]) -> None:
    store = SimulatedStore()
    play(
        [
            SimulatedEngine(SETTINGS, store, time.monotonic, simulated_index(store, OPTIONS, time.monotonic))
            for _ in range(3)
        ]
    )
    real = [RealEngine(tmp_path) for _ in range(3)]
    try:
        play(real)  # type: ignore[arg-type]
        duplicates = sum(engine.index.take_store_counts().duplicates for engine in real)
    finally:
        for engine in real:
            engine.close()
    counted = store.counts.requests
    expected = {
        "put pack": counted["PUT pack"],
        "put manifest": counted["PUT manifest"] + counted["PUT replaced"],
        "get pack": counted["GET range"],
        "get manifest": counted["GET lookup"] + counted["GET conflict"],
    }
    num_checks = requests.pop("check pack")  # the simulation leaves them out
    assert 0 < num_checks <= expected["put pack"] * len(real), "an engine checks a pack once"
    assert {kind: number for kind, number in requests.items() if "other" not in kind} == expected
    assert all(expected.values()) and counted["GET conflict"]
    assert (duplicates, store.counts.num_duplicates) == (24, 24)
    kept = sum(path.stat().st_size for path in tmp_path.rglob("*") if parse_name(str(path.relative_to(tmp_path))).owner)
    assert kept - sum(path.stat().st_size for path in tmp_path.rglob("epoch")) == store.kept_bytes


def timed(*contents: str, every_s: float = 10.0) -> list[TimedRequest]:
    return [TimedRequest(place * every_s, request) for place, request in enumerate(prompts(*contents))]


def test_a_reused_prefix_is_stored_only_if_one_engine_gets_it_twice() -> None:
    spread = [FleetSettings(10_000, cascades_all=cascades_all) for cascades_all in (False, True)]
    reused, everything = (run_fleet(timed(*["abcdefgh"] * 6), each, 128).counts for each in spread)
    assert (reused.hit_tokens, reused.puts) == (0, 0)
    assert everything.hit_tokens == 5 * 8 * 128 and everything.ram_tokens == 0
    near = run_fleet(timed(*["abcdefgh"] * 6), FleetSettings(10_000, by_affinity=True), 128).counts
    assert near.hit_tokens == near.ram_tokens == 5 * 8 * 128
    assert near.num_chunks == 16 and not near.num_duplicates


def test_other_load_evicts_host_memory() -> None:
    settings = FleetSettings(1, ram_bytes=1 << 30)
    trace = timed("abcdefgh", "abcdefgh")
    assert run_fleet(trace, settings, 128).counts.ram_tokens == 8 * 128
    assert run_fleet(trace, settings, 128, load_share=0.01).counts.ram_tokens == 0


def test_engines_that_store_concurrently_store_twice() -> None:
    settings = FleetSettings(100, cascades_all=True)
    assert not run_fleet(burst(100, 1000.0)[:20], settings, 128).counts.num_duplicates
    assert run_fleet(burst(100, 0.1)[:20], settings, 128).counts.num_duplicates > 100


def test_a_sample_has_complete_conversations() -> None:
    trace = timed(*(f"s{chr(65 + place % 26)}{chr(97 + place // 26)}" for place in range(260)))
    kept = sample(trace, 0.3)
    names = {each.request.chunks[1] for each in kept}
    assert 0 < len(kept) < 260
    assert kept == [each for each in trace if each.request.chunks[1] in names]


def test_the_cost_follows_the_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--traces", str(tmp_path), "--put-price", "1", "--get-price", "2", "--storage-price", "3"])
    store = SimulatedStore()
    store.counts.requests.update({"PUT pack": 10, "PUT manifest": 5, "GET range": 7})
    store.counts.total_tokens = 500_000
    assert cost_of(store.counts, 10**9, options) == {"put": 0.03, "get": 0.028, "kept": 0.6}
    options = parse(["--traces", str(tmp_path), "--engines", "2", "--burst", "1"])
    assert json.loads(json.dumps(run_burst(options)))[1]["cascade"] == "all"
    assert "burst" in capsys.readouterr().out
