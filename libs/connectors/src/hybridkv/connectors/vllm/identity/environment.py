"""Facts of the environment."""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3


def environment_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Every variable that may change content, by name: a digest of its value."""
    return {
        f"environment.{name}": "blake3:" + blake3(value.encode(errors="surrogateescape")).hexdigest(8)
        for name, value in sorted(environ.items())
        if name.startswith("VLLM_")
    }
