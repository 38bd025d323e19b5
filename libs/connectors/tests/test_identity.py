from pathlib import Path

from hybridkv.connectors.vllm.identity import weights_identity


def write(root: Path, name: str, content: bytes) -> None:
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(content)


def model(root: Path, weights: bytes, config: bytes = b"{}") -> str:
    write(root, "config.json", config)
    write(root, "model.safetensors", weights)
    return str(root)


def test_the_same_files_have_the_same_identity_wherever_they_lie(tmp_path: Path) -> None:
    first = weights_identity(model(tmp_path / "a", b"weights"))
    assert first and first == weights_identity(model(tmp_path / "b", b"weights"))


def test_other_weights_or_another_configuration_are_another_model(tmp_path: Path) -> None:
    base = bytes(9 << 20)
    middle = len(base) // 2 // ((len(base) - (1 << 16)) // 63) * ((len(base) - (1 << 16)) // 63)
    changed_start, changed_end = b"\1" + base[1:], base[:-1] + b"\1"
    identities = {
        weights_identity(model(tmp_path / "f", base[:middle] + b"\1" + base[middle + 1 :])),
        weights_identity(model(tmp_path / "a", base)),
        weights_identity(model(tmp_path / "b", changed_start)),
        weights_identity(model(tmp_path / "c", changed_end)),
        weights_identity(model(tmp_path / "d", base + b"\0")),
        weights_identity(model(tmp_path / "e", base, b'{"a": 1}')),
    }
    assert len(identities) == 6


def test_a_hub_name_is_told_by_its_revision() -> None:
    assert weights_identity("org/model-that-is-not-a-path") == ""
