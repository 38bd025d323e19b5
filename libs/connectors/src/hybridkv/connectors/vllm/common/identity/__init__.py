"""Facts for the fingerprint: named values of the engine's process that the stored bytes depend on.

`engine_facts` collects all of these. The facts of workers, the groups and the chunk length are added when the
fingerprint is built. This package reads no device, and no tensor except in `worker_facts`.
"""

from hybridkv.connectors.vllm.common.identity.configuration import configuration_facts, spec_facts
from hybridkv.connectors.vllm.common.identity.engine import EngineFacts, IdentityConfig, engine_facts
from hybridkv.connectors.vllm.common.identity.environment import environment_facts
from hybridkv.connectors.vllm.common.identity.excluded import without_ignored

__all__ = [
    "EngineFacts",
    "IdentityConfig",
    "configuration_facts",
    "engine_facts",
    "environment_facts",
    "spec_facts",
    "without_ignored",
]
