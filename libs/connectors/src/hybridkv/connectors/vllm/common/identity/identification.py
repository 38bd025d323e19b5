"""Whose content a store keeps: what the engine's process knows at its start, and what its workers say later.

What outlives the engine, or is shared, is named by all of it. Host memory alone begins with the engine and ends with
it, so nobody else ever reads a key of it.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common.identity import EngineFacts, IdentityConfig, engine_facts, without_ignored
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.identity.worker_facts import merged, that_matter
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.hashing import ChunkKeys

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hybridkv")

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose content an engine's chunks have.

    Args:
        keys: of the model as it was when the engine began.
        adapters: of what is laid over it.
    """

    keys: ChunkKeys
    adapters: Adapters

    @property
    def namespace(self) -> bytes:
        """Of what others share."""
        return self.keys.fingerprint.digest()

    def begin_anew(self) -> ChunkKeys:
        """Keys that nobody has had, for the model as it is; those of adapters change alike."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.adapters.begin_anew(nonce)
        return self.keys.for_adapter(nonce)


class Identification:
    """What is known of an engine, and what of its workers is still to be heard.

    Args:
        vllm_config: final.
        config: what the operator says of identity.
        layout: of the engine's groups.
        connector: in whose name an operator is told.
        is_shared: whether anybody else may ever read what is stored. If not, no worker need say anything.

    Raises:
        ConfigurationError: the engine's own facts cannot be gathered.
    """

    def __init__(
        self, vllm_config: VllmConfig, config: IdentityConfig, layout: CacheLayout, connector: str, *, is_shared: bool
    ) -> None:
        self._config = config
        self._layout = layout
        self._began_ns = time.time_ns()
        self.needs_no_worker = not is_shared
        self._engine = _of_engine(vllm_config, config, connector) if is_shared else _of_memory_alone()

    @property
    def num_ranks(self) -> int:
        """How many workers must say what they know."""
        return self._layout.world_size

    def identity(self, ranks: Mapping[int, Mapping[str, str]]) -> Identity:
        """Whose content it is.

        Args:
            ranks: what each worker said.

        Raises:
            ConfigurationError: what is to be ignored is no fact, or ranks contradict each other.
        """
        facts = self._engine.facts
        if not self.needs_no_worker:
            facts = without_ignored(facts | merged(ranks, facts), self._config.identity_ignores)
            facts = that_matter(facts, self._layout.spec)
        keys = ChunkKeys(self._layout.fingerprint(facts), self._layout.hash_block_tokens)
        return Identity(keys, Adapters(keys, self._began_ns))


def _of_engine(vllm_config: VllmConfig, config: IdentityConfig, connector: str) -> EngineFacts:
    found = engine_facts(vllm_config, os.environ, config)
    if found.unrepeatable:
        logger.warning(
            "%s: no other process will find what this engine leaves: %s",
            connector,
            "; ".join(f"{name}: {why}" for name, why in sorted(found.unrepeatable.items())),
        )
    return found


def _of_memory_alone() -> EngineFacts:
    return EngineFacts({"engine.process": secrets.token_hex(16)}, {})
