"""Identity of an engine's stored content: keys from the facts of its process and of its workers.

If there are tiers that outlive the engine or are shared, the keys depend on all facts. If host memory is the only tier,
no other process ever reads its content: a random number replaces the facts of the process, and the workers' facts are
not needed.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.identity.engine import EngineFacts, IdentityConfig, engine_facts
from hybridkv.connectors.vllm.common.identity.excluded import without_ignored
from hybridkv.connectors.vllm.common.identity.worker_facts import merged, relevant_facts
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.hashing import ChunkKeys

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hybridkv")

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of an engine's chunks.

    Args:
        keys: keys of the model as it was when the engine started.
        adapters: keys of chunks with an adapter.
    """

    keys: ChunkKeys
    adapters: Adapters

    @property
    def namespace(self) -> bytes:
        """Namespace of content that is shared with other engines."""
        return self.keys.fingerprint.digest()

    def begin_anew(self) -> ChunkKeys:
        """Gives `adapters` new keys that no other process has. Returns such keys of the model, which the caller uses in
        place of `keys`; `keys` itself does not change."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.adapters.begin_anew(nonce)
        return self.keys.for_adapter(nonce)


class IdentityBuilder:
    """Builds the identity of an engine from the engine's own facts and the later facts of its workers.

    Args:
        vllm_config: final configuration.
        config: the operator's settings of identity.
        layout: layout of the engine's groups.
        connector: name of the connector, for the log.
        is_shared: whether another process may read the stored content, now or later. If not, the identity needs no
            facts of workers.

    Raises:
        ConfigurationError: the engine's own facts cannot be gathered.
    """

    def __init__(
        self, vllm_config: VllmConfig, config: IdentityConfig, layout: CacheLayout, connector: str, *, is_shared: bool
    ) -> None:
        self._config = config
        self._layout = layout
        self._began_ns = time.time_ns()
        self._is_shared = is_shared
        self._engine = _of_engine(vllm_config, config, connector) if is_shared else _of_memory_alone()

    def identity(self, ranks: Mapping[int, Mapping[str, str]]) -> Identity:
        """Identity from the facts of the engine and of all workers.

        Args:
            ranks: facts of each rank; used only if the content is shared.

        Raises:
            ConfigurationError: an entry of `identity_ignores` names no fact; checked only if the content is shared.
        """
        facts = self._engine.facts
        if self._is_shared:
            facts = without_ignored(facts | merged(ranks, facts), self._config.identity_ignores)
            facts = relevant_facts(facts, self._layout.spec)
        keys = ChunkKeys(self._layout.fingerprint(facts), self._layout.hash_block_tokens)
        return Identity(keys, Adapters(keys, self._began_ns))


def _of_engine(vllm_config: VllmConfig, config: IdentityConfig, connector: str) -> EngineFacts:
    found = engine_facts(vllm_config, os.environ, config)
    if found.unrepeatable:
        logger.warning(
            "%s: no other process can reuse the content that this engine stores: %s",
            connector,
            "; ".join(f"{name}: {why}" for name, why in sorted(found.unrepeatable.items())),
        )
    return found


def _of_memory_alone() -> EngineFacts:
    return EngineFacts({"engine.process": secrets.token_hex(16)}, {})
