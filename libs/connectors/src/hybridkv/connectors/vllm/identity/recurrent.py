"""Facts of recurrent states, which say nothing about a model that has none, though machines may differ in them."""

from __future__ import annotations

from collections.abc import Mapping

from hybridkv.planner import CacheSpec, GroupKind

OF_CONVOLUTIONS = (
    "environment.VLLM_SSM_CONV_STATE_LAYOUT",
    "worker.environment.VLLM_SSM_CONV_STATE_LAYOUT",
    "worker.conv_state_layout",
)
"""How what a convolution remembers is laid out. Only who reads it by element need not have it alike."""
OF_STATES = ("cache_config.mamba_cache_dtype", "cache_config.mamba_ssm_cache_dtype", *OF_CONVOLUTIONS)
"""A CPU platform settles these by its instruction set, whatever the model is."""


def that_matter(facts: Mapping[str, str], spec: CacheSpec) -> dict[str, str]:
    """The facts but for those of states that the model does not have."""
    if any(group.kind is GroupKind.RECURRENT for group in spec.groups):
        return dict(facts)
    return {name: value for name, value in facts.items() if name not in OF_STATES}
