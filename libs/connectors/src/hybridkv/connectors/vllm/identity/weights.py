"""Which weights a model path stands for, so that two trainings of one architecture never share a cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 64
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".pth")


def weights_identity(model: str) -> str:
    """A digest of a local model's configuration and weights, or "" where `model` is a hub name.

    Weights are sampled, not read whole: the name and size of every file, and 64 KiB at 64 places spread over it, which
    for a small file is all of it. Two checkpoints that differ only between those places are taken for one.

    Raises:
        OSError: a file of the model cannot be read.
    """
    root = Path(model)
    if not root.exists():
        return ""
    files = [root] if root.is_file() else _files(root)
    hasher = blake3()
    for path in files:
        size = path.stat().st_size
        hasher.update(f"{path.name}\0{size}\0".encode())
        stride = max(_SAMPLE_BYTES, (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
        with path.open("rb") as file:
            for offset in sorted({*range(0, size, stride), max(0, size - _SAMPLE_BYTES)}):
                file.seek(offset)
                hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest(16)


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in (".json", *_WEIGHTS) and path.is_file())


def weights_facts(vllm_config: VllmConfig, mode: str) -> tuple[dict[str, str], dict[str, str]]:
    """The identity of what is loaded, by name, and why some of it has none that another process could find again."""
    if mode not in ("sampled", "full"):
        return {"weights.model": f"named {mode}"}, {}
    identity = weights_identity(vllm_config.model_config.model)
    if not identity:
        return {}, {"weights.model": "no files of it are on this machine"}
    return {"weights.model": identity}, {}
