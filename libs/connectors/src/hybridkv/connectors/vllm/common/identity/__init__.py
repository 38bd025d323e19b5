"""What the stored bytes depend on, as facts with names: the part of a fingerprint that the engine's own process knows.

`engine_facts` is all of it. What a worker alone knows, the groups and the chunk are added by whoever builds the
fingerprint; nothing here looks at a device or at a tensor.
"""

from hybridkv.connectors.vllm.common.identity.configuration import configuration_facts, spec_facts
from hybridkv.connectors.vllm.common.identity.engine import EngineFacts, IdentityConfig, engine_facts
from hybridkv.connectors.vllm.common.identity.environment import environment_facts
from hybridkv.connectors.vllm.common.identity.ignored import without_ignored

__all__ = [
    "EngineFacts",
    "IdentityConfig",
    "configuration_facts",
    "engine_facts",
    "environment_facts",
    "spec_facts",
    "without_ignored",
]
