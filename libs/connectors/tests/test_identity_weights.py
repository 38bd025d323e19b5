from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from identity_configs import make_config, write_model
from vllm.config import LoadConfig

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.identity import digests
from hybridkv.connectors.vllm.common.identity.digests import CACHE_FILE_NAME, FileDigests
from hybridkv.connectors.vllm.common.identity.weights import (
    EXCLUDED_SETTINGS,
    CollectedFacts,
    add_weights_facts,
    weights_identity,
)

TENSOR_BYTES = 1 << 16


def safetensors(tensors: dict[str, bytes], **metadata: str) -> bytes:
    """File of byte tensors, in the given order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


TENSORS = {name: name.encode() * TENSOR_BYTES for name in "abc"}
CONTENT = safetensors(TENSORS)


def model(root: Path, content: bytes = CONTENT, name: str = "model.safetensors") -> Path:
    write_model(root)
    (root / name).write_bytes(content)
    return root


def identity(root: Path, mode: str = "sampled", **load: Any) -> str | None:
    return weights_identity(str(root), None, LoadConfig(**load), mode)


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Cache digests of files that are new.
    monkeypatch.setattr(digests, "SETTLED_NS", -1 << 62)
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kind of each digest that is computed."""
    kinds: list[str] = []
    for kind in ("_full", "_sampled"):
        real = getattr(digests, kind)
        monkeypatch.setattr(digests, kind, lambda *given, real=real, kind=kind: (kinds.append(kind), real(*given))[1])
    return kinds


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_equal_files_have_one_identity_at_any_path(tmp_path: Path, mode: str) -> None:
    first = identity(model(tmp_path / "a"), mode)
    (tmp_path / "a").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    assert first is not None and first.startswith(f"{mode} blake3:")
    assert first == identity(tmp_path / "moved", mode) == identity(tmp_path / "copied", mode)


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_other_weights_have_another_identity(tmp_path: Path, mode: str) -> None:
    data = len(CONTENT) - len(TENSORS) * TENSOR_BYTES
    others = {
        "header": safetensors({"x": TENSORS["a"], "b": TENSORS["b"], "c": TENSORS["c"]}),
        "metadata": safetensors(TENSORS, format="pt"),
        "first byte": flipped(CONTENT, data),
        "last byte": flipped(CONTENT, len(CONTENT) - 1),
        "second tensor alone": flipped(CONTENT, data + TENSOR_BYTES),
        "its middle": flipped(CONTENT, data + TENSOR_BYTES * 3 // 2),
        "its end": flipped(CONTENT, data + 2 * TENSOR_BYTES - 1),
        "longer": CONTENT + b"\0",
        "shorter": CONTENT[:-1],
        "no header": b"\0" * len(CONTENT),
        "empty": b"",
    }
    found = {name: identity(model(tmp_path / name, content), mode) for name, content in others.items()}
    found["itself"] = identity(model(tmp_path / "itself"), mode)
    found["another name"] = identity(model(tmp_path / "name", name="other.safetensors"), mode)
    found["two files"] = identity(model(model(tmp_path / "two"), name="more.safetensors"), mode)
    assert len(set(found.values())) == len(others) + 3 and None not in found.values()


def test_only_a_full_digest_covers_bytes_between_samples(tmp_path: Path) -> None:
    data = len(CONTENT) - len(TENSORS) * TENSOR_BYTES
    between = flipped(CONTENT, data + digests.TENSOR_SAMPLE_BYTES + 1)
    a, b = model(tmp_path / "a"), model(tmp_path / "b", between)
    assert identity(a) == identity(b) and identity(a, "full") != identity(b, "full")


def test_each_of_many_tensors_is_sampled(tmp_path: Path) -> None:
    tensors = {f"t{i}": bytes(64) for i in range(digests.FILE_SAMPLES + 1)}
    content = safetensors(tensors)
    changed = safetensors(tensors | {"t999": b"\1" + bytes(63)})
    assert len(content) == len(changed)
    assert identity(model(tmp_path / "a", content)) != identity(model(tmp_path / "b", changed))


@pytest.mark.parametrize("broken", [b"[]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": [5, 1000000]}}', b"{" * 5000])
def test_an_invalid_header_is_sampled_like_other_bytes(tmp_path: Path, broken: bytes) -> None:
    content = struct.pack("<Q", len(broken)) + broken + bytes(300)
    assert identity(model(tmp_path / "a", content)) != identity(model(tmp_path / "b", flipped(content, -1 % 308)))


def test_files_without_tensors_are_sampled_at_even_distances(tmp_path: Path) -> None:
    content = bytes(9 << 20)
    stride = (len(content) - digests.BLOB_SAMPLE_BYTES) // (digests.BLOB_SAMPLES - 1)
    places = (0, 31 * stride, len(content) - 1)
    found = {identity(model(tmp_path / "a", content, "model.bin"))}
    for place in places:
        found.add(identity(model(tmp_path / str(place), flipped(content, place), "model.bin")))
    assert len(found) == len(places) + 1


def test_the_identity_of_one_file_is_its_content(tmp_path: Path) -> None:
    root = model(tmp_path / "a")
    shutil.copy(root / "model.safetensors", tmp_path / "other.gguf")
    assert identity(root / "model.safetensors") == identity(tmp_path / "other.gguf") is not None


def test_files_that_the_loader_does_not_read_do_not_count(tmp_path: Path) -> None:
    base = identity(model(tmp_path / "a"))
    for i, name in enumerate(["model.bin", ".cache/x.safetensors", "original/x.pth", "README.md", "config.json"]):
        there = model(tmp_path / str(i))
        (there / name).parent.mkdir(exist_ok=True)
        (there / name).write_bytes(b"{}")
        assert identity(there) == base
    # An unknown loader may read any file.
    (tmp_path / "a" / "weights.own").write_bytes(b"1")
    first = identity(tmp_path / "a", load_format="their-own")
    (tmp_path / "a" / "weights.own").write_bytes(b"2")
    assert first != identity(tmp_path / "a", load_format="their-own") and identity(tmp_path / "a") == base


def test_weights_in_a_subdirectory_count(tmp_path: Path) -> None:
    root = model(tmp_path / "a")
    base = identity(root)
    model(root / "encoder", b"weights", "encoder.bin")
    assert identity(root) != base


@pytest.mark.parametrize("name", ["org/no-such-model", "nosuchmodel", "s3://bucket/model", "/no/such/path", "a/b/c"])
def test_weights_missing_on_this_machine_have_no_identity(name: str) -> None:
    assert weights_identity(name, None, LoadConfig(), "sampled") is None


@pytest.mark.parametrize("load_format", ["tensorizer", "modelexpress", "ipc_cache"])
def test_weights_from_a_remote_loader_have_no_identity(tmp_path: Path, load_format: str) -> None:
    assert weights_identity(str(model(tmp_path)), None, LoadConfig(load_format=load_format), "sampled") is None


def test_a_directory_without_weights_has_no_identity(tmp_path: Path) -> None:
    assert identity(write_model(tmp_path)) is None


def test_a_hub_name_is_the_local_snapshot_of_its_revision(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    for commit, content in (("1" * 40, CONTENT), ("2" * 40, flipped(CONTENT, -1 % len(CONTENT)))):
        blob = repository / "blobs" / commit
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        snapshot = write_model(repository / "snapshots" / commit)
        (snapshot / "model.safetensors").symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("2" * 40)
    load = LoadConfig(download_dir=str(tmp_path / "hub"))
    pinned, latest = (weights_identity("org/name", revision, load, "sampled") for revision in ("1" * 40, None))
    assert pinned == identity(model(tmp_path / "local")) and latest is not None and latest != pinned


def test_a_digest_is_computed_again_only_after_a_change(tmp_path: Path, read: list[str]) -> None:
    root = model(tmp_path)
    file = root / "model.safetensors"
    first = identity(root)
    assert identity(root) == first and read == ["_sampled"]
    identity(root, "full")
    assert identity(root, "full") and identity(root) == first and read == ["_sampled", "_full"]

    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert identity(root) == first and len(read) == 3
    file.write_bytes(CONTENT + b"1")
    assert identity(root) != first and len(read) == 4
    file.write_bytes(CONTENT)
    other = file.with_suffix(".new")
    shutil.copy2(file, other)
    identity(root)
    other.replace(file)
    assert identity(root) == first and len(read) == 6


def test_equal_size_and_mtime_do_not_prove_equal_content(tmp_path: Path) -> None:
    root = model(tmp_path)
    file = root / "model.safetensors"
    first, status = identity(root), file.stat()
    file.write_bytes(flipped(CONTENT, len(CONTENT) - 1))
    while file.stat().st_ctime_ns == status.st_ctime_ns:
        # The clock of the file system may stand still for some milliseconds.
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns and file.stat().st_ino == status.st_ino
    assert identity(root) != first


def test_the_digest_of_a_recently_changed_file_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "SETTLED_NS", 1000)
    file = model(tmp_path) / "model.safetensors"
    changed_ns = file.stat().st_ctime_ns
    for passed_ns, is_kept in ((999, False), (1000, True)):
        found = FileDigests(tmp_path, "sampled", clock_ns=lambda passed_ns=passed_ns: changed_ns + passed_ns)
        found.of(file)
        found.save()
        assert (tmp_path / CACHE_FILE_NAME).exists() == is_kept


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format_version": 1}', b"\xff\xfe"])
def test_a_damaged_cache_of_digests_is_ignored(tmp_path: Path, read: list[str], damage: bytes) -> None:
    root = model(tmp_path)
    first = identity(root)
    (root / CACHE_FILE_NAME).write_bytes(damage)
    assert identity(root) == first and len(read) == 2


def test_a_cache_of_another_version_is_ignored(tmp_path: Path, read: list[str]) -> None:
    root = model(tmp_path)
    first = identity(root)
    kept = json.loads((root / CACHE_FILE_NAME).read_bytes())
    (root / CACHE_FILE_NAME).write_text(json.dumps(kept | {"format_version": digests.FORMAT_VERSION + 1}))
    assert identity(root) == first and len(read) == 2


def test_a_cache_copied_to_another_directory_is_ignored(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a"), model(tmp_path / "b", flipped(CONTENT, len(CONTENT) - 1))
    identity(a)
    expected = identity(b)
    shutil.copy(a / CACHE_FILE_NAME, b / CACHE_FILE_NAME)
    assert identity(b) == expected != identity(a)


def test_digests_of_a_read_only_directory_are_in_the_user_cache(
    tmp_path: Path, user_cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = model(tmp_path / "model")
    real = digests._write

    def refuse(place: Path, data: bytes) -> None:
        # Tests may run as root, which file modes do not stop.
        if place.parent == root:
            raise PermissionError(13, "Permission denied", str(place))
        real(place, data)

    monkeypatch.setattr(digests, "_write", refuse)
    first = identity(root)
    assert identity(root) == first and read == ["_sampled"]
    assert not (root / CACHE_FILE_NAME).exists() and len(list(user_cache.rglob(f"*{CACHE_FILE_NAME}"))) == 1


def test_without_a_writable_cache_only_time_is_lost(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(place: Path, data: bytes) -> None:
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(digests, "_write", refuse)
    root = model(tmp_path)
    with caplog.at_level("INFO", "hybridkv"):
        assert identity(root) == identity(root) is not None
    assert len(read) == 2 and "are not cached" in caplog.text and str(root) in caplog.text


def test_a_failed_write_keeps_the_old_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = model(tmp_path / "model")
    identity(root)
    before = (root / CACHE_FILE_NAME).read_bytes()

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    identity(root, "full")
    assert (root / CACHE_FILE_NAME).read_bytes() == before
    assert sorted(path.name for path in root.iterdir()) == [CACHE_FILE_NAME, "config.json", "model.safetensors"]


def test_digests_of_removed_files_are_dropped(tmp_path: Path) -> None:
    root = model(model(tmp_path), name="more.safetensors")
    identity(root)
    (root / "more.safetensors").unlink()
    (root / "model.safetensors").write_bytes(CONTENT + b"1")
    identity(root)
    assert json.loads((root / CACHE_FILE_NAME).read_bytes())["digests"].keys() == {"sampled model.safetensors"}


def test_the_digest_of_a_file_changed_while_read_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = model(tmp_path)
    real = digests._sampled

    def changing(file: Any, size: int) -> str:
        found = real(file, size)
        (root / "model.safetensors").write_bytes(CONTENT + b"1")
        return found

    monkeypatch.setattr(digests, "_sampled", changing)
    found = FileDigests(root, "sampled")
    found.of(root / "model.safetensors")
    found.save()
    assert not (root / CACHE_FILE_NAME).exists()


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    root = write_model(tmp_path)
    (root / "model.safetensors").symlink_to(root)
    (root / "broken.safetensors").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigurationError) as caught:
        identity(root)
    assert caught.value.path == str(root / "broken.safetensors") and "weights_digest" in caught.value.hint


def gathered(root: Path, mode: str = "sampled", load: dict[str, Any] | None = None, **changes: Any) -> CollectedFacts:
    config = make_config(root, load)
    for name, value in changes.items():
        setattr(config.model_config, name, value)
    found = CollectedFacts()
    add_weights_facts(config, mode, found)
    return found


def test_the_facts_of_a_model_are_its_weights_and_settings_files(tmp_path: Path) -> None:
    root = model(tmp_path)
    for name in ("preprocessor_config.json", "model.safetensors.index.json", *EXCLUDED_SETTINGS):
        if name != "config.json":
            (root / name).write_text("{}")
    base = gathered(root)
    assert base.facts.keys() == {
        "weights.model",
        'files.model["preprocessor_config.json"]',
        'files.model["model.safetensors.index.json"]',
    }
    assert base.unrepeatable == {} and base.facts["weights.model"] == identity(root)
    (root / "preprocessor_config.json").write_text('{"a": 1}')
    assert gathered(root).facts != base.facts


def test_the_formatting_of_the_configuration_does_not_count(tmp_path: Path) -> None:
    root = model(tmp_path)
    base = gathered(root)
    (root / "config.json").write_text(json.dumps(json.loads((root / "config.json").read_text()), indent=3))
    assert gathered(root).facts == base.facts


def test_a_digest_named_by_the_operator_replaces_all_files(tmp_path: Path) -> None:
    root = model(tmp_path)
    found = gathered(root, "mine, of May")
    (root / "model.safetensors").write_bytes(b"other")
    assert found == gathered(root, "mine, of May") == CollectedFacts(facts={"weights.named": "mine, of May"})
    assert not (root / CACHE_FILE_NAME).exists()


def test_missing_files_give_a_hint(tmp_path: Path) -> None:
    found = gathered(write_model(tmp_path))
    assert found.facts == {} and "weights_digest" in found.unrepeatable["weights.model"]


def test_dummy_weights_are_repeatable_unless_quantized(tmp_path: Path) -> None:
    dummy = {"load_format": "dummy"}
    found = gathered(write_model(tmp_path), load=dummy)
    assert found.facts["weights.model"].startswith("dummy, of torch 2.") and not found.unrepeatable
    assert "integers" in gathered(tmp_path, load=dummy, quantization="gptq").unrepeatable["weights.model"]


def test_the_drafter_has_its_own_weights(tmp_path: Path) -> None:
    config = make_config(model(tmp_path / "target"))
    draft = make_config(model(tmp_path / "draft", flipped(CONTENT, len(CONTENT) - 1))).model_config

    def facts(draft_config: Any) -> dict[str, str]:
        config.speculative_config = SimpleNamespace(draft_model_config=draft_config, draft_load_config=None)
        found = CollectedFacts()
        add_weights_facts(config, "sampled", found)
        return found.facts

    with_draft = facts(draft)
    assert with_draft.keys() == {"weights.model", "weights.drafter"} and len(set(with_draft.values())) == 2
    # A model that drafts for itself, and a drafter without a model.
    assert facts(make_config(tmp_path / "target").model_config).keys() == {"weights.model"} == facts(None).keys()
