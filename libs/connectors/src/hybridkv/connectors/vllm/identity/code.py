"""The code that comes with a model and runs because the operator trusts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.identity.sources import Gathered, is_hidden, local_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def code_facts(vllm_config: VllmConfig, gathered: Gathered) -> None:
    """A digest of every Python file of a model whose configuration names code, if such code may run.

    Raises:
        ConfigurationError: such a file cannot be read.
    """
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for name, model in (("code.model", vllm_config.model_config), ("code.drafter", draft)):
        if model is not None and model.trust_remote_code:
            _model(name, model, vllm_config.load_config.download_dir, gathered)


def _model(name: str, model: ModelConfig, download_dir: str | None, gathered: Gathered) -> None:
    for repository in sorted(set(_repositories(getattr(model.hf_config, "auto_map", None) or {}))):
        revision = model.code_revision or (model.revision if not repository else None)
        root = local_files(repository or model.model, revision, download_dir)
        at = f"{name}[{repository!r}]" if repository else name
        if root is None or not root.is_dir():
            gathered.unrepeatable[at] = "the model's own code is not among the files of this machine"
        else:
            gathered.facts[at] = _digest(root)


def _repositories(auto_map: Any) -> Iterator[str]:
    """Where the classes of an `auto_map` are: "" for the model's own files, or a repository of the hub."""
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        for reference in value if isinstance(value, list | tuple) else (value,):
            if isinstance(reference, str):
                yield reference.partition("--")[0] if "--" in reference else ""


def _digest(root: Path) -> str:
    hasher = blake3()
    for path in sorted(root.rglob("*.py")):
        if is_hidden(path, root):
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(
                str(path), "a file that can be read", error.strerror or str(error), "the model's code is part of it"
            ) from error
        hasher.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        hasher.update(content)
    return "blake3:" + hasher.hexdigest(16)
