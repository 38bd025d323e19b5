"""All facts of the engine's own process, and whether another process could ever have the same."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.identity.configuration import configuration_facts
from hybridkv.connectors.vllm.identity.environment import environment_facts
from hybridkv.connectors.vllm.identity.weights import weights_facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybridkv.connectors.config import OffloadConfig

VERSION = "engine.version"
UNREPEATABLE = "engine.process"


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


def engine_facts(vllm_config: VllmConfig, environ: Mapping[str, str], config: OffloadConfig) -> EngineFacts:
    """What the bytes depend on, as far as the engine's own process knows: configuration, environment, weights, version.

    Nothing that an operator ignores has been taken out: facts of the worker come first (`without_ignored`).

    Raises:
        ConfigurationError: a value of the configuration is of a type that has no canonical text, or a file of the
            weights cannot be read.
    """
    facts = {VERSION: engine_version()}
    facts |= configuration_facts(vllm_config, config.identity_ignores)
    facts |= environment_facts(environ)
    weights, unrepeatable = weights_facts(vllm_config, config.weights_digest)
    facts |= weights
    if unrepeatable:
        facts[UNREPEATABLE] = f"{secrets.token_hex(16)} ({'; '.join(sorted(unrepeatable))})"
    return EngineFacts(facts, unrepeatable)


def engine_version() -> str:
    """The engine's minor version, such as "0.32"."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])
