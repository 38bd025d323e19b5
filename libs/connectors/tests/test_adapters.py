"""Adapters have keys only if their files hold the weights that the engine holds, whoever changes the files and when."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import patience
import pytest
from test_lookups import FULL, HASHES, make_layout
from vllm.lora.request import LoRARequest

from hybridkv.connectors.vllm.common.identity import adapters as module
from hybridkv.connectors.vllm.common.identity.adapters import Adapters, AdapterVersion
from hybridkv.connectors.vllm.common.identity.files import NotReadableError, content, signature

KEYS = make_layout([FULL]).keys
LATER_NS = 3600 * 10**9
SOON_S = patience.seconds(6.0)


def write(directory: Path, weights: bytes = b"weights", config: bytes = b"{}") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_bytes(config)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def request(path: Path | str, number: int = 1, *, in_place: bool = False, name: str = "tuned") -> LoRARequest:
    return LoRARequest(name, number, str(path), load_inplace=in_place)


class Engine:
    """Adapters of an engine that starts an hour from now, so that all files written by a test are an hour old."""

    def __init__(self, began_ns: int | None = None) -> None:
        now_ns = time.time_ns() + LATER_NS
        self.adapters = Adapters(KEYS, now_ns if began_ns is None else began_ns, lambda: now_ns)

    def current_version(self, lora: LoRARequest, is_conflict_free: bool = True) -> AdapterVersion | None:
        """Answer to the second request; the first one makes the files be read."""
        self.adapters.on_request(lora)
        assert self.adapters.wait_until_idle(SOON_S)
        return self.adapters.current_version(lora, is_conflict_free)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(module, "LOOK_S", SOON_S)
    return Engine()


def key(adapter_version: AdapterVersion | None) -> bytes:
    assert adapter_version is not None
    return adapter_version.keys.key(0, HASHES, 8)


def test_an_adapter_has_no_version_before_its_files_are_read(engine: Engine, tmp_path: Path) -> None:
    lora = request(write(tmp_path / "a"))
    assert engine.adapters.current_version(lora, True) is None
    assert engine.adapters.wait_until_idle(SOON_S)
    assert engine.adapters.current_version(lora, True) is not None


def test_the_keys_follow_the_content_and_not_the_path(engine: Engine, tmp_path: Path) -> None:
    first = key(engine.current_version(request(write(tmp_path / "a"))))
    assert first != KEYS.key(0, HASHES, 8)
    assert first == key(engine.current_version(request(write(tmp_path / "b"), 2)))
    others = {
        key(engine.current_version(request(write(tmp_path / "c", b"Weights"), 3))),
        key(engine.current_version(request(write(tmp_path / "d", config=b"[]"), 4))),
    }
    assert len(others | {first}) == 3
    turned = request(tmp_path / "a", 5)
    turned.is_3d_lora_weight = True
    assert key(engine.current_version(turned)) not in others | {first}


def test_after_a_reset_adapter_keys_belong_to_this_engine_alone(engine: Engine, tmp_path: Path) -> None:
    lora = request(write(tmp_path / "a"))
    write(tmp_path / "b")
    keys = [key(engine.current_version(lora))]
    for nonce in (b"1" * 16, b"2" * 16):
        engine.adapters.begin_anew(nonce)
        keys.append(key(engine.current_version(lora)))
        assert keys[-1] == key(engine.current_version(lora)) == key(engine.current_version(request(tmp_path / "b", 2)))
    assert len(set(keys)) == 3


def test_files_changed_after_the_start_of_the_engine_are_in_doubt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(began_ns=time.time_ns())
    lora = request(write(tmp_path / "a"))
    assert engine.current_version(lora) is None
    assert engine.current_version(lora) is None
    # Under another number they stay in doubt: the time at which the engine read them is unknown.
    assert engine.current_version(request(tmp_path / "a", 2)) is None


@pytest.mark.parametrize("restored", [False, True], ids=["changed", "changed and restored"])
def test_files_changed_after_they_were_read_are_in_doubt(engine: Engine, tmp_path: Path, restored: bool) -> None:
    lora = request(write(tmp_path / "a"))
    adapter_version = engine.current_version(lora)
    assert engine.adapters.is_still_valid(adapter_version)
    times = (tmp_path / "a" / "adapter_model.safetensors").stat()
    write(tmp_path / "a", b"retrain")
    if restored:
        write(tmp_path / "a")
        os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not engine.adapters.is_still_valid(adapter_version)
    assert engine.current_version(lora) is None
    assert engine.current_version(lora) is None


def test_files_replaced_with_equal_times_are_in_doubt(engine: Engine, tmp_path: Path) -> None:
    write(tmp_path / "old")
    write(tmp_path / "new", b"retrain")
    (tmp_path / "a").symlink_to("old")
    adapter_version = engine.current_version(request(tmp_path / "a"))
    (tmp_path / "a").unlink()
    (tmp_path / "a").symlink_to("new")
    assert not engine.adapters.is_still_valid(adapter_version)


def test_an_adapter_loaded_in_place_is_certain_again(engine: Engine, tmp_path: Path) -> None:
    lora = request(write(tmp_path / "a"))
    old = key(engine.current_version(lora))
    write(tmp_path / "a", b"retrain")
    assert engine.current_version(lora) is None
    in_place = request(tmp_path / "a", in_place=True)
    assert engine.current_version(in_place, is_conflict_free=False) is None, (
        "another running request keeps the engine from reading the files again"
    )
    adapter_version = engine.current_version(in_place)
    assert key(adapter_version) != old
    # Until this request has run, the engine may hold either version.
    assert engine.current_version(lora) is None
    assert engine.adapters.is_still_valid(adapter_version)
    assert key(engine.current_version(lora)) == key(adapter_version)


def test_a_number_reused_for_another_adapter_is_in_doubt_for_both(engine: Engine, tmp_path: Path) -> None:
    """The engine selects weights by the number: it may give either adapter the weights of the other."""
    first, second = request(write(tmp_path / "a")), request(write(tmp_path / "b", b"others!"), name="other")
    adapter_version = engine.current_version(first)
    assert engine.adapters.is_still_valid(adapter_version)
    assert engine.current_version(second) is None
    assert not engine.adapters.is_still_valid(adapter_version) and not engine.adapters.is_unchanged(adapter_version)
    assert engine.current_version(first) is None
    in_place = engine.current_version(request(tmp_path / "b", name="other", in_place=True))
    assert engine.current_version(request(tmp_path / "b", name="other")) is None, (
        "until it has run, the engine may hold either version"
    )
    assert engine.adapters.is_still_valid(in_place)
    assert key(engine.current_version(second)) == key(in_place)
    assert engine.current_version(first) is None
    assert not engine.adapters.is_still_valid(in_place)


def test_numbers_beyond_the_remembered_ones_are_in_doubt(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SEEN", 1)
    write(tmp_path / "a")
    assert engine.current_version(request(tmp_path / "a")) is not None
    assert engine.current_version(request(tmp_path / "a", 2)) is None
    assert engine.current_version(request(tmp_path / "a", 2, in_place=True)) is None
    assert engine.current_version(request(tmp_path / "a")) is not None


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_replaced_parent_directory_is_noticed(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_forgotten: bool
) -> None:
    """Its files are older than the engine, and differ from those that the engine has read."""
    write(tmp_path / "all" / "a")
    write(tmp_path / "new" / "a", b"retrain")
    lora = request(tmp_path / "all" / "a")
    engine.adapters.on_request(lora)
    assert engine.adapters.wait_until_idle(SOON_S)
    if is_forgotten:
        monkeypatch.setattr(module, "MAX_ADAPTERS", 1)
        engine.adapters.on_request(request(tmp_path, 2))
    (tmp_path / "all").rename(tmp_path / "old")
    (tmp_path / "new").rename(tmp_path / "all")
    assert engine.current_version(lora) is None
    assert engine.current_version(lora) is None


def test_files_written_just_before_they_were_read_are_in_doubt(tmp_path: Path) -> None:
    write(tmp_path / "a")
    changed_ns = signature(str(tmp_path / "a")).changed_ns
    adapters = Adapters(KEYS, 0, lambda: changed_ns)
    lora = request(tmp_path / "a", in_place=True)
    for _ in range(2):
        adapters.on_request(lora)
        assert adapters.wait_until_idle(SOON_S)
        assert adapters.current_version(lora, True) is None


@pytest.mark.parametrize("path", ["organisation/adapter", "/nowhere/at/all"])
def test_an_unreadable_adapter_has_no_keys_and_one_warning(
    engine: Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[object, ...]] = []
    monkeypatch.setattr(module.logger, "warning", lambda *about: said.append(about))
    for _ in range(3):
        assert engine.current_version(request(path)) is None
    (line,) = said
    assert path in line


def test_a_directory_without_weights_is_no_adapter(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(NotReadableError, match="no adapter"):
        content(str(tmp_path / "a"), {})


def test_other_files_beside_an_adapter_are_not_read(tmp_path: Path) -> None:
    before = content(str(write(tmp_path / "a")), {})
    (tmp_path / "a" / "optimizer.pt").write_bytes(b"state")
    assert content(str(tmp_path / "a"), {}).digest == before.digest


def test_a_file_system_that_hangs_costs_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lora = Engine(), request(write(tmp_path / "a"))
    monkeypatch.setattr(module, "LOOK_S", SOON_S)
    adapter_version = engine.current_version(lora)
    gate, num_looks = threading.Event(), []

    def hang(path: str) -> None:
        num_looks.append(path)
        gate.wait(SOON_S)

    monkeypatch.setattr(module, "signature", hang)
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    for _ in range(5):
        assert not engine.adapters.is_still_valid(adapter_version)
    gate.set()
    assert engine.adapters.wait_until_idle(SOON_S)
    assert len(num_looks) == 1


def test_the_least_recently_used_adapter_is_forgotten(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTERS", 2)
    write(tmp_path / "a")
    first = engine.current_version(request(tmp_path / "a", 1))
    for number in (2, 3):
        assert engine.current_version(request(tmp_path / "a", number)) is not None
    assert not engine.adapters.is_still_valid(first)
    assert engine.current_version(request(tmp_path / "a", 1)) is not None
