"""vLLM still lacks the functions that `mamba2_cpu` replaces, and the replacement is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mamba2_cpu
import pytest
import torch

CHUNK_ENDS = [0, 32, 64, 70, 102, 110]
SEQUENCE_OF_CHUNK = [0, 0, 0, 1, 1]
LAST_CHUNKS = [2, 4]


@pytest.fixture
def scan(directory: Path) -> dict[str, Any]:
    """Arguments of the scan for two sequences of 70 and 40 tokens. The first sequence already has a state."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens, heads, head_size, state = CHUNK_ENDS[-1], 2, 64, 16
    return {
        "inputs": (
            random(tokens, heads, head_size),
            random(tokens, heads),
            -torch.rand(heads, generator=generator),
            random(tokens, 1, state),
            random(tokens, 1, state),
        ),
        "options": {
            "chunk_size": 32,
            "D": torch.ones(heads),
            "z": None,
            "dt_bias": torch.zeros(heads),
            "seq_idx": torch.tensor(SEQUENCE_OF_CHUNK, dtype=torch.int32),
            "cu_seqlens": torch.tensor([0, 70, 110], dtype=torch.int32),
            "cu_chunk_seqlens": torch.tensor(CHUNK_ENDS, dtype=torch.int32),
            "last_chunk_indices": torch.tensor(LAST_CHUNKS, dtype=torch.int32),
            "initial_states": torch.stack([random(heads, head_size, state), torch.zeros(heads, head_size, state)]),
            "dt_softplus": True,
            "dt_limit": (0.0, float("inf")),
            "state_dtype": torch.float32,
        },
    }


def run(arguments: dict[str, Any], *, all_chunks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The states and the output."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    out = torch.empty_like(arguments["inputs"][0])
    states = mamba_mixer2.mamba_chunk_scan_combined_varlen(
        *arguments["inputs"], **arguments["options"], out=out, return_intermediate_states=all_chunks
    )
    return states, out


def test_vllms_cpu_scan_still_returns_one_state_per_sequence(scan: dict[str, Any]) -> None:
    """If this fails, vLLM has fixed it: remove `mamba2_cpu`."""
    states, _ = run(scan, all_chunks=True)
    assert len(states) == len(LAST_CHUNKS)


def test_the_replacement_returns_the_state_at_each_chunk_end(scan: dict[str, Any]) -> None:
    last, output = run(scan, all_chunks=False)
    with mamba2_cpu.checkpoints_in_plain_torch():
        states, same_output = run(scan, all_chunks=True)
    assert len(states) == len(SEQUENCE_OF_CHUNK)
    torch.testing.assert_close(states[LAST_CHUNKS], last)
    torch.testing.assert_close(same_output, output)
    assert not torch.allclose(states[0], states[1])
