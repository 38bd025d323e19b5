"""Identity of the weights that an engine loads, so that two trainings of one architecture do not share a cache.

Files are identified by their content and by their names below the model's directory, not by the place of the directory.
Other files that the engine reads at run time, such as the settings of an image processor, are included. If the operator
gives the weights a name, only the name is a fact, and none of these files is read. Weights that have no name and that
another process cannot find again, for example streamed weights, have no identity: no other process can use their stored
content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.identity.digests import FileDigests
from hybridkv.connectors.vllm.common.identity.fact_text import child, digested

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig


@dataclass(frozen=True, slots=True)
class CollectedFacts:
    """Facts that several functions collect.

    Args:
        facts: canonical text by dotted name.
        unrepeatable: reasons why another process cannot have the same content, by the name of a fact or setting.
    """

    facts: dict[str, str] = field(default_factory=dict)
    unrepeatable: dict[str, str] = field(default_factory=dict)


def local_files(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Directory or file of a model: `model` itself if it is a path, or the snapshot of a hub's name in the local cache.
    None if the model is not on this machine, or if the name may belong to another hub than Hugging Face.
    """
    path = Path(model)
    if path.exists():
        return path
    if "://" in model or model.count("/") > 1 or path.is_absolute():
        return None
    import vllm.envs

    if vllm.envs.VLLM_USE_MODELSCOPE:
        # On this hub, the name may mean another model than in the cache of Hugging Face.
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def is_hidden(path: Path, root: Path) -> bool:
    """Whether the path below `root` has a file or directory name that starts with a dot."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".npz", ".npy")
_BY_FORMAT: Mapping[str, tuple[str, ...]] = {
    "auto": (".safetensors", ".bin", ".pt"),
    "hf": (".safetensors", ".bin", ".pt"),
    "safetensors": (".safetensors",),
    "fastsafetensors": (".safetensors",),
    "instanttensor": (".safetensors",),
    "runai_streamer": (".safetensors",),
    "runai_streamer_sharded": (".safetensors",),
    "sharded_state": (".safetensors",),
    "mistral": (".safetensors",),
    "npcache": (".bin",),
    "pt": (".pt",),
}
"""Suffixes of the files that a load format reads. Only files with the first suffix that has files are read."""
_ELSEWHERE = ("tensorizer", "modelexpress", "ipc_cache")
"""Load formats that read weights from other processes or services."""

EXCLUDED_SETTINGS: Mapping[str, str] = {
    "config.json": "the resulting configuration is in the fingerprint",
    "params.json": "the resulting configuration is in the fingerprint",
    "tokenizer.json": "tokens are the key",
    "tokenizer_config.json": "tokens are the key",
    "special_tokens_map.json": "tokens are the key",
    "added_tokens.json": "tokens are the key",
    "vocab.json": "tokens are the key",
    "tekken.json": "tokens are the key",
    "chat_template.json": "tokens are the key",
    "generation_config.json": "how tokens are chosen; for Llama 4, whose attention reads it, it is a fact",
    "trainer_state.json": "how it was trained",
    "all_results.json": "how it was trained",
    "train_results.json": "how it was trained",
    "eval_results.json": "how it was trained",
}
"""JSON files beside the weights that are not in the fingerprint, each with its reason. Other JSON files are in it."""


def add_weights_facts(vllm_config: VllmConfig, mode: str, collected: CollectedFacts) -> None:
    """Adds facts of the weights of the model and of its drafter.

    Args:
        vllm_config: final configuration.
        mode: "sampled", "full", or the operator's name of the weights; with a name, neither weights nor settings beside
            them are read.
        collected: gets the facts, and reasons for weights without an identity.

    Raises:
        ConfigurationError: a file of the weights cannot be read.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if mode not in ("sampled", "full"):
        collected.facts["weights.named"] = digested(mode) if not mode.isprintable() else mode
        return
    _one("model", model, load, mode, collected)
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft is model or (draft.model, draft.revision) == (model.model, model.revision):
        # The drafter has no weights, or its weights are in the model's own files.
        return
    draft_load = getattr(speculative, "draft_load_config", None) or load
    _one("drafter", draft, draft_load, mode, collected)


def weights_identity(model: str, revision: str | None, load: LoadConfig, mode: str) -> str | None:
    """Digest of the files that a load format reads for a model; None if the files are not on this machine, or if the
    format reads no files. Caches digests, see `FileDigests.save`.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    root = local_files(model, revision, load.download_dir)
    if root is None or load.load_format in _ELSEWHERE:
        return None
    files = [root] if root.is_file() else weight_files(root, load.load_format)
    if not files:
        return None
    base = root.parent if root.is_file() else root
    digests = FileDigests(base, mode)
    hasher = blake3()
    for path in files:
        try:
            size, digest = digests.of(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        # A single file is identified only by its content, because its name is the name of the model.
        name = "" if root.is_file() else path.relative_to(base).as_posix()
        hasher.update(f"{name}\0{size}\0{digest}\0".encode())
    digests.save()
    return f"{mode} blake3:{hasher.hexdigest(16)}"


def weight_files(root: Path, load_format: str) -> list[Path]:
    """Files of a directory that a load format reads, and all files of weights in its subdirectories. For a format that
    `_BY_FORMAT` does not list: all files of the directory except `EXCLUDED_SETTINGS`. Hidden files, and the
    subdirectory `original`, are left out."""
    found = sorted(path for path in root.rglob("*") if path.is_file() and not is_hidden(path, root))
    top = [path for path in found if path.parent == root]
    below = [path for path in found if path.parent != root and path.suffix in SUFFIXES]
    below = [path for path in below if path.relative_to(root).parts[0] != "original"]
    if load_format not in _BY_FORMAT:
        # It is unknown which files this load format reads.
        return [path for path in top if path.name not in EXCLUDED_SETTINGS] + below
    for suffix in _BY_FORMAT[load_format]:
        if mine := [path for path in top if path.suffix == suffix]:
            return mine + below
    return below


def _one(name: str, model: ModelConfig, load: LoadConfig, mode: str, collected: CollectedFacts) -> None:
    fact = f"weights.{name}"
    source = getattr(model, "model_weights", "") or model.model
    if load.load_format == "dummy":
        _dummy(fact, model, collected)
    else:
        identity = weights_identity(source, model.revision, load, mode)
        if identity is None:
            collected.unrepeatable[fact] = (
                f"load format {load.load_format} leaves no weights on this machine that could be digested; "
                f'give them a name of yours ("weights_digest" in {ROOT}) and another name whenever they change'
            )
            return
        collected.facts[fact] = identity
    root = local_files(model.model, model.revision, load.download_dir)
    if root is not None and root.is_dir():
        collected.facts.update(_settings(f"files.{name}", root, model))


def _dummy(fact: str, model: ModelConfig, collected: CollectedFacts) -> None:
    """Adds a fact of random weights: they are equal in every process, because each tensor comes from one seed. Weights
    of a quantized model are unrepeatable: tensors of integers keep earlier content of the memory."""
    import torch

    if model.quantization is not None:
        collected.unrepeatable[fact] = "load format dummy leaves integers of quantized weights as memory held them"
        return
    collected.facts[fact] = f"dummy, of torch {'.'.join(torch.__version__.split('.')[:2])}"


def _settings(name: str, root: Path, model: Any) -> dict[str, str]:
    """Digests of the JSON files beside the weights that the engine may read at run time, by fact name."""
    is_llama4 = "llama4" in str(getattr(model.hf_config, "model_type", ""))
    facts = {}
    for path in sorted(root.glob("*.json")):
        reads = path.name not in EXCLUDED_SETTINGS or (is_llama4 and path.name == "generation_config.json")
        if reads and path.is_file() and not is_hidden(path, root):
            try:
                facts[child(name, path.name)] = "blake3:" + blake3(path.read_bytes()).hexdigest(16)
            except OSError as error:
                raise _unreadable(path, error) from error
    return facts


def _unreadable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        str(path),
        "a file of the model that can be read",
        error.strerror or str(error),
        'the cache of a model is identified by its files; name them with "weights_digest" to avoid reading them',
    )
