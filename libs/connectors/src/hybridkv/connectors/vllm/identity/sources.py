"""Where the files of a model are on this machine. Nothing is ever fetched."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Gathered:
    """What is found out bit by bit: both are filled as it comes.

    Args:
        facts: dotted name to canonical text.
        unrepeatable: why something has no fact that another process could find again, by its name.
    """

    facts: dict[str, str] = field(default_factory=dict)
    unrepeatable: dict[str, str] = field(default_factory=dict)


def local_files(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """A model's directory or file: itself where it is a path, or what a hub's name stands for in the local cache.

    None where nothing of it is on this machine.
    """
    path = Path(model)
    if path.exists():
        return path
    if "://" in model or model.count("/") > 1 or path.is_absolute():
        return None
    import vllm.envs

    if vllm.envs.VLLM_USE_MODELSCOPE:
        # The name may stand for something else in the cache of the other hub.
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def is_hidden(path: Path, root: Path) -> bool:
    """Whether a file, or a directory on the way to it from the root, has a name that starts with a dot."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)
