"""Which weights a model path stands for, so that two trainings of one architecture never share a cache."""

import os
from pathlib import Path

from blake3 import blake3

_SAMPLE_BYTES = 1 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".pth")


def weights_identity(model: str) -> str:
    """A digest of a local model's configuration and weights, or "" where `model` is a hub name.

    Weights are sampled: the name and size of every file and its first and last MiB. A safetensors file begins with the
    offsets of all its tensors, and training moves every one of them, so two checkpoints differ in the samples.

    Raises:
        OSError: a file of the model cannot be read.
    """
    root = Path(model)
    if not root.exists():
        return ""
    files = [root] if root.is_file() else sorted(p for p in root.iterdir() if p.suffix in (".json", *_WEIGHTS))
    hasher = blake3()
    for path in files:
        size = path.stat().st_size
        hasher.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            hasher.update(file.read(_SAMPLE_BYTES))
            if size > _SAMPLE_BYTES:
                file.seek(max(_SAMPLE_BYTES, size - _SAMPLE_BYTES), os.SEEK_SET)
                hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest(16)
