"""What vLLM's CPU build lacks for Mamba-2 with prefix caching, in plain torch, for the time of a test.

A Mamba-2 layer saves the state at the last block boundary of a prompt while it goes on to the prompt's end: it asks the
scan for the states at all chunk ends (`return_intermediate_states`) and copies the one at the boundary, with the
convolution's inputs before it, into a block (`store_prefill_checkpoint`). vLLM 0.32's scan for the CPU returns the last
state of each sequence whatever it was asked for, so that a step beyond a block's end to the prompt's end stops the
engine with an IndexError in `MambaMixer2.conv_ssm_forward`, without any connector too; and the copy is a Triton kernel,
which the CPU build has no compiler for. Here the CPU's own scan runs chunk by chunk, and the copy is two assignments.
Nothing else of the engine is touched: which blocks are checkpoints, and what is handed to a connector, is vLLM's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch


@dataclass(slots=True)
class SavedStates:
    """How many states were saved in the middle of a prompt."""

    count: int = 0


@contextlib.contextmanager
def checkpoints_in_plain_torch() -> Iterator[SavedStates]:
    """A context in which Mamba-2 layers on the CPU save the states that prefix caching needs."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    scan = mamba_mixer2.mamba_chunk_scan_combined_varlen
    saved = SavedStates()

    def states_of_all_chunks(*arguments: Any, **options: Any) -> torch.Tensor:
        if not options["return_intermediate_states"]:
            return scan(*arguments, **options)
        return _scan_by_chunk(scan, arguments, options)

    def store(checkpoint: Any, *arguments: Any, **options: Any) -> None:
        saved.count += _store_checkpoint(checkpoint, *arguments, **options)

    with (
        mock.patch.object(mamba_mixer2, "mamba_chunk_scan_combined_varlen", states_of_all_chunks),
        mock.patch.object(mamba_mixer2, "store_prefill_checkpoint", store),
    ):
        yield saved


def _scan_by_chunk(scan: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """The states at the ends of all chunks of all sequences, in order; the output is written in place."""
    x, dt, decay, b, c = arguments
    ends = options["cu_chunk_seqlens"].tolist()
    sequences = options["seq_idx"].tolist()
    initial = options["initial_states"]
    states: list[torch.Tensor] = []
    for chunk, (start, end) in enumerate(itertools.pairwise(ends)):
        if chunk and sequences[chunk] == sequences[chunk - 1]:
            before = states[-1]
        else:
            before = None if initial is None else initial[sequences[chunk] : sequences[chunk] + 1]
        part = slice(start, end)
        changed = {
            "cu_seqlens": torch.tensor([0, end - start], dtype=torch.int32),
            "initial_states": before,
            "out": options["out"][part],
            "return_intermediate_states": False,
        }
        states.append(scan(x[part], dt[part], decay, b[part], c[part], **(options | changed)))
    return torch.cat(states)


def _store_checkpoint(
    checkpoint: Any,
    chunk_idx: torch.Tensor,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    chunk_states: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    state_len: int,
) -> int:
    """vLLM's `_store_prefill_checkpoint_kernel`, row by row. Returns how many rows had a state to save."""
    rows = [row for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()) if offset]
    for row in rows:
        block = int(checkpoint.state_indices[row])
        end = int(query_start_loc[row]) + int(checkpoint.checkpoint_offsets[row])
        conv_state[block, :, :state_len] = x[:, end - state_len : end]
        ssm_state[block] = chunk_states[int(chunk_idx[row])].to(ssm_state.dtype)
    return len(rows)
