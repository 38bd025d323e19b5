"""Names on the pages that belong to other projects or tools, so that no file of this tree has them.

Short on purpose. A name that our code uses needs no entry, even if another project defines it. An unused entry is an
error.
"""

from __future__ import annotations

_BY_OWNER: dict[str, tuple[str, ...]] = {
    "vLLM": (
        "--kv-cache-memory-bytes",
        "--max-num-batched-tokens",
        "--prefix-cache-retention-interval",
        "--prefix-caching-hash-algo",
        "--prefix-match-unit",
        "NixlPushConnector",
        "VLLM_KV_CACHE_LAYOUT",
        "_handle_invalid_blocks",
        "bidirectional_kv_xfer",
        "mamba_mixer2.py",
        "mamba_ssm_cache_dtype",
        "model_loader_extra_config",
        "preprocess_mamba",
        "reset_external",
        "vllm:prompt_tokens_total",
    ),
    "clients of object stores": (
        "--endpoint-url",
        "AWS_ACCESS_KEY_ID",
        "AWS_ENDPOINT_URL",
        "AWS_REGION",
    ),
    "Bazel and rules_python": (
        "--nobuild",
        "--only",
        "--run_under",
        "SKIPPED",
        "pip_parse",
        "py_wheel",
    ),
    "Linux": (
        "cp -al",
        "df",
        "systemd-tmpfiles",
        "vm.mmap_rnd_bits",
    ),
    "systemd, Docker and Kubernetes": (
        "--time",
        "stop_grace_period",
    ),
}

FOREIGN = frozenset(name for names in _BY_OWNER.values() for name in names)
