"""Facts of the environment: every variable that may change what is computed, by name. Values are digested.

Of the engine's own variables all count but those on a list; of others those count that libraries beneath it read to
choose instructions, precisions or kernels. An unset variable is no fact.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase

from hybridkv.connectors.vllm.common.identity.fact_text import digested
from hybridkv.connectors.vllm.common.identity.left_out_environment import ENVIRONMENT_LEFT_OUT

ENVIRONMENT = "environment"
COUNTED = (
    "VLLM_*",
    "ATEN_*",
    "ONEDNN_*",
    "DNNL_*",
    "MKL_*",
    "TORCH_*",
    "TORCHINDUCTOR_*",
    "TORCHDYNAMO_*",
    "PYTORCH_*",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_*",
    "CUBLASLT_*",
    "CUDNN_*",
    "TRITON_*",
    "FLASHINFER_*",
    "FLASH_ATTENTION_*",
    "DG_*",
    "AITER_*",
    "MIOPEN_*",
    "ROCBLAS_*",
    "HIPBLASLT_*",
    "HSA_OVERRIDE_GFX_VERSION",
)
"""Variables that count unless they are left out."""


def environment_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Every variable that is set and may change content: a digest of its value."""
    return {
        f"{ENVIRONMENT}.{name}": digested(value)
        for name, value in sorted(environ.items())
        if counts(name) and variable_left_out(name) is None and not _is_service_address(name, value)
    }


def _is_service_address(name: str, value: str) -> bool:
    """Whether Kubernetes says so where a service of the namespace is, as `<SERVICE>_PORT` for Docker's old links."""
    return name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))


def counts(name: str) -> bool:
    """Whether a variable is of those that count unless they are left out."""
    return any(fnmatchcase(name, pattern) for pattern in COUNTED)


@functools.cache
def variable_left_out(name: str) -> str | None:
    """Why a variable is no fact, if a list says so."""
    if name in ENVIRONMENT_LEFT_OUT:
        return ENVIRONMENT_LEFT_OUT[name]
    for pattern, reason in ENVIRONMENT_LEFT_OUT.items():
        if "*" in pattern and fnmatchcase(name, pattern):
            return reason
    return None
