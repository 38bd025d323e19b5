"""All facts of the engine's own process, and whether another process could ever have the same."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hybridkv.connectors.vllm.identity.code import code_facts
from hybridkv.connectors.vllm.identity.configuration import configuration_facts
from hybridkv.connectors.vllm.identity.environment import environment_facts
from hybridkv.connectors.vllm.identity.sources import Gathered
from hybridkv.connectors.vllm.identity.weights import weights_facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VERSION = "engine.version"
NONCE = "engine.process"


class IdentityConfig(Protocol):
    """What an operator says of identity."""

    @property
    def weights_digest(self) -> str: ...

    @property
    def identity_ignores(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine's own process knows.

    Args:
        facts: dotted name to canonical text.
        unrepeatable: why no other process can have the same content, by the name of what it hangs on; empty where one
            can. Where it is not empty the facts hold a nonce: a store that outlives the process would never be read.
    """

    facts: dict[str, str]
    unrepeatable: dict[str, str]


def engine_facts(vllm_config: VllmConfig, environ: Mapping[str, str], config: IdentityConfig) -> EngineFacts:
    """What the bytes depend on, as far as the engine's own process knows: configuration, environment, weights, version.

    Nothing that an operator ignores has been taken out: facts of the worker come first (`without_ignored`).

    Raises:
        ConfigurationError: a value of the configuration is of a type that has no canonical text, or a file of the
            weights cannot be read.
    """
    facts = {VERSION: engine_version()}
    facts |= configuration_facts(vllm_config, config.identity_ignores)
    facts |= environment_facts(environ)
    gathered = Gathered()
    weights_facts(vllm_config, config.weights_digest, gathered)
    code_facts(vllm_config, gathered)
    _changing(vllm_config, gathered)
    facts |= gathered.facts
    if gathered.unrepeatable:
        facts[NONCE] = f"{secrets.token_hex(16)}, for {', '.join(sorted(gathered.unrepeatable))}"
    return EngineFacts(facts, gathered.unrepeatable)


def engine_version() -> str:
    """The engine's minor version, such as "0.32"."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def _changing(vllm_config: VllmConfig, gathered: Gathered) -> None:
    """What is settled while the engine runs, by its first requests or from outside."""
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        gathered.unrepeatable["cache_config.calculate_kv_scales"] = (
            "the scales of the cache come from the first batch of this process; use a checkpoint that has scales"
        )
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is not None and multimodal.mm_processor_cache_gb == 0 and not cache.enable_prefix_caching:
        gathered.unrepeatable["multimodal_config.mm_processor_cache_gb"] = (
            "with 0 and without prefix caching the engine names images by a counter and not by what they hold"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        gathered.unrepeatable["weight_transfer_config"] = "weights are sent to the running engine; no file has them"
