"""Requests with a LoRA adapter, and resets, at an LMCache server: in doubt nothing is found or stored there."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import patience
import pytest
from hypothesis import given
from vllm.lora.request import LoRARequest

from hybridkv.connectors.vllm import register
from hybridkv.connectors.vllm.common.identity import adapters
from hybridkv.hashing import ChunkKeys
from oracle.engine import OracleEngine
from oracle.lmcache_runs import Play, Played, at, played, reach, require_idle, scheduler_of
from oracle.lmcache_servers import VERSIONS, Server, Sort, fleet_of
from oracle.mixes import GEMMA3, GPT_OSS, Mix
from oracle.peer_mixes import MLA
from oracle.profile import profile
from oracle.runner import CorruptionError
from oracle.scenarios import Tally
from oracle.settings import EngineSettings

PROMPT = list(range(200))
WHOLE = 192
HOUR_NS = 3600 * 10**9
SOON_S = patience.seconds(6.0)


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Server:
    register()
    return fleet_of(request.param, request.config)[Sort.APART]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "LOOK_S", SOON_S)


def train(path: Path, number: int) -> LoRARequest:
    """An adapter with other weights for another number."""
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(bytes([number]) * 100)
    return LoRARequest(path.name, 1 + number % 2, str(path))


def age_files(engine: OracleEngine) -> None:
    """Makes the files of the engine's adapters an hour old at its start."""
    found = scheduler_of(engine)._identity.adapters
    found._began_ns += HOUR_NS
    now_ns = time.time_ns() + HOUR_NS
    found._now_ns = lambda: now_ns


class AdapterEngine:
    """An engine that answers one prompt again and again."""

    def __init__(self, engine: OracleEngine, server: Server) -> None:
        self.engine, self.server = engine, server
        self.count = 0
        assert reach(engine)
        age_files(engine)

    def restored(self, lora: LoRARequest | None = None, model: int | None = None) -> int:
        """Tokens of the prompt that are restored with the adapter that the engine holds; its own cache is empty."""
        self.engine.reset_prefix_cache()
        before = self.engine.restored_tokens
        self.count += 1
        self.engine.submit(f"request {self.count}", PROMPT, 2, lora, model)
        self.engine.drain()
        require_idle(self.engine)
        assert scheduler_of(self.engine)._identity.adapters.wait_until_idle(SOON_S)
        # A completed store becomes readable a moment later.
        assert self.server.is_at_rest(), self.server.held()
        return self.engine.restored_tokens - before


@contextmanager
def open_engine(
    server: Server,
    identity: str,
    before_step: Callable[[OracleEngine, int], None] | None = None,
    pool_chunks: int | None = None,
    max_step_tokens: int = 64,
    mix: Mix = GPT_OSS,
) -> Iterator[AdapterEngine]:
    server.begin()
    connector = at(server, mix, identity, pool_chunks)
    settings = EngineSettings(
        num_blocks=200, retention_tokens=None, connector=connector, max_step_tokens=max_step_tokens
    )
    with OracleEngine(mix, settings, before_step) as engine:
        yield AdapterEngine(engine, server)


def is_found_again(restored: list[int], whole: int = WHOLE) -> bool:
    """Whether these are the restored tokens of successive requests with a new adapter.

    The first request reads the adapter's files. It stores its chunks if the files are read before it ends; otherwise
    the second one does.
    """
    return restored[0] == 0 and restored[1] in (0, whole) and set(restored[2:]) <= {whole}


def test_an_adapter_is_found_again_and_its_retraining_finds_nothing(server: Server, tmp_path: Path) -> None:
    identity, lora = uuid.uuid4().hex, train(tmp_path / "tuned", 1)
    with open_engine(server, identity) as life:
        assert is_found_again([life.restored(lora, 1) for _ in range(3)])
        assert life.restored() == 0, "a model without the adapter is another one"
    train(tmp_path / "tuned", 2)
    with open_engine(server, identity) as life:
        assert is_found_again([life.restored(lora, 2) for _ in range(3)])


def test_tokens_computed_while_files_changed_are_not_stored(server: Server, tmp_path: Path) -> None:
    identity, lora = uuid.uuid4().hex, train(tmp_path / "tuned", 1)

    def retrain(engine: OracleEngine, step: int) -> None:
        if "request 2" in engine.scheduler.requests:
            train(tmp_path / "tuned", 2)

    with open_engine(server, identity, retrain) as life:
        assert is_found_again([life.restored(lora, 1) for _ in range(2)])
    with open_engine(server, identity) as life:
        assert is_found_again([life.restored(lora, 2) for _ in range(2)])


def test_a_step_with_more_chunks_than_the_pool_holds_is_stored_in_pieces(server: Server, tmp_path: Path) -> None:
    """A store is sent only once all of it is copied, so it must not wait for its own pages."""
    identity, lora = uuid.uuid4().hex, train(tmp_path / "tuned", 1)
    with open_engine(server, identity, pool_chunks=2, max_step_tokens=256, mix=MLA) as life:
        assert is_found_again([life.restored(lora, 1) for _ in range(3)], 2 * server.sort.chunk_tokens)


def test_an_identity_of_name_and_path_alone_is_caught(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a retrained adapter loads the chunks of its former training, and the oracle notices."""
    monkeypatch.setattr(ChunkKeys, "for_adapter", lambda keys, digest: keys)
    identity, lora = uuid.uuid4().hex, train(tmp_path / "tuned", 1)
    with open_engine(server, identity) as life:
        assert is_found_again([life.restored(lora, 1) for _ in range(2)])
    train(tmp_path / "tuned", 2)
    with open_engine(server, identity) as life, pytest.raises(CorruptionError):
        [life.restored(lora, 2) for _ in range(2)]


def test_requests_with_and_without_adapters_never_read_a_wrong_byte(server: Server, tmp_path: Path) -> None:
    tally = Tally()
    loras = [(train(tmp_path / f"tuned{number}", number), number) for number in (1, 2)]

    class Tuned(Play):
        def start(self, model: int = 0) -> OracleEngine:
            engine = super().start(model)
            age_files(engine)
            return engine

    @profile(10, whole=True)
    @given(played(GEMMA3, server))
    def check(chosen: Played) -> None:
        for engine in Tuned(GEMMA3, server, chosen, adapters=loras).run():
            tally.add(engine)

    check()
    print(tally)
    assert tally.with_restored > 0, tally


def test_chunks_stored_after_a_reset_are_found_by_the_same_engine_only(server: Server) -> None:
    """Weights may have been changed in place: the next engine reads others from the files."""
    identity = uuid.uuid4().hex
    with open_engine(server, identity) as life:
        assert [life.restored(), life.restored()] == [0, WHOLE]
        assert life.engine.reset_connector()
        assert [life.restored(), life.restored()] == [0, WHOLE]
    with open_engine(server, identity) as life:
        assert life.restored() == WHOLE, "chunks stored before the reset are shared by all engines"
        assert life.engine.reset_connector()
        assert life.restored() == 0
