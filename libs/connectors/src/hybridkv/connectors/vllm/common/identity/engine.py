"""All facts of the engine's own process, and reasons why no other process can have the same content."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from blake3 import blake3

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.identity.configuration import configuration_facts
from hybridkv.connectors.vllm.common.identity.environment import environment_facts
from hybridkv.connectors.vllm.common.identity.weights import CollectedFacts, add_weights_facts, is_hidden, local_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def add_code_facts(vllm_config: VllmConfig, collected: CollectedFacts) -> None:
    """Adds a digest of the Python files that the model and its drafter bring, if `trust_remote_code` allows such code.
    Adds a reason to `collected.unrepeatable` if the files are not on this machine.

    Raises:
        ConfigurationError: a Python file cannot be read.
    """
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for name, model in (("code.model", vllm_config.model_config), ("code.drafter", draft)):
        if model is not None and model.trust_remote_code:
            _model(name, model, vllm_config.load_config.download_dir, collected)


def _model(name: str, model: ModelConfig, download_dir: str | None, collected: CollectedFacts) -> None:
    for repository in sorted(set(_repositories(getattr(model.hf_config, "auto_map", None) or {}))):
        revision = model.code_revision or (model.revision if not repository else None)
        root = local_files(repository or model.model, revision, download_dir)
        at = f"{name}[{repository!r}]" if repository else name
        if root is None or not root.is_dir():
            collected.unrepeatable[at] = "the model's own code is not on this machine"
        else:
            collected.facts[at] = _digest(root)


def _repositories(auto_map: Any) -> Iterator[str]:
    """Repositories of the classes in an `auto_map`: "" for the model's own files, else a repository of the hub."""
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
                str(path), "a file that can be read", error.strerror or str(error), "the cache depends on this code"
            ) from error
        hasher.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        hasher.update(content)
    return "blake3:" + hasher.hexdigest(16)


VERSION = "engine.version"
NONCE = "engine.process"


class IdentityConfig(Protocol):
    """The operator's settings of identity."""

    @property
    def weights_digest(self) -> str: ...

    @property
    def identity_ignores(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of the engine's own process.

    Args:
        facts: canonical text by dotted name.
        unrepeatable: reasons why no other process can have the same content, by the name of a fact or setting. If not
            empty, the facts contain a nonce, so no other process reads the stored content.
    """

    facts: dict[str, str]
    unrepeatable: dict[str, str]


def engine_facts(vllm_config: VllmConfig, environ: Mapping[str, str], config: IdentityConfig) -> EngineFacts:
    """Facts of the engine's own process: configuration, environment, weights, code, version.

    Facts that the operator ignores are included: `without_ignored` removes them after the workers' facts have arrived.

    Raises:
        ConfigurationError: a value of the configuration has a type without canonical text, or a file of the weights or
            of the model's code cannot be read.
    """
    facts = {VERSION: engine_version()}
    facts |= configuration_facts(vllm_config, config.identity_ignores)
    facts |= environment_facts(environ)
    collected = CollectedFacts()
    add_weights_facts(vllm_config, config.weights_digest, collected)
    add_code_facts(vllm_config, collected)
    _add_runtime_reasons(vllm_config, collected)
    facts |= collected.facts
    if collected.unrepeatable:
        facts[NONCE] = f"{secrets.token_hex(16)}, for {', '.join(sorted(collected.unrepeatable))}"
    return EngineFacts(facts, collected.unrepeatable)


def engine_version() -> str:
    """The engine's minor version, such as "0.32"."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def _add_runtime_reasons(vllm_config: VllmConfig, collected: CollectedFacts) -> None:
    """Adds the reasons for content that depends on this process: on its first requests, or on other processes."""
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        collected.unrepeatable["cache_config.calculate_kv_scales"] = (
            "the scales of the cache come from the first batch of this process; use a checkpoint that has scales"
        )
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is not None and multimodal.mm_processor_cache_gb == 0 and not cache.enable_prefix_caching:
        collected.unrepeatable["multimodal_config.mm_processor_cache_gb"] = (
            "with 0 and without prefix caching the engine names images by a counter and not by their content"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        collected.unrepeatable["weight_transfer_config"] = "weights are sent to the running engine; no file has them"
