"""Writes the reference page of models: `python page.py rows.json > docs/reference/models.md`.

The rows are what a run of the zoo saw; Bazel keeps them among the test's undeclared outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from families import ANSWER_TOKENS, FAMILIES, Family, Resumable
from rows import Row, read_rows

_TITLE = "# Models"
_INTRODUCTION = """\
Generated from what a run of `//tests/zoo:zoo_test` saw, by `tests/zoo/page.py`; every run compares the two. The models
are tiny random ones with the layers and groups of their families, on vLLM's CPU build, one engine each.
[Groups](../concepts/groups.md) says what the kinds are."""
_SERVED = """\
## Served

For each: the engine loses its cache, the prefix comes back, and what the model then says equals what it says after the
engine's own hit of the same length, in tokens, in log-probabilities to the last digit, and in every byte of every page.
So does the next turn of a conversation (the last prompt, its answer of {answer} tokens and 16 more), and so do four
requests that run together and share prefixes in pairs. Numbers are tokens that came back, of the prompt's.

The controls say that this proves something: another prefix gives other tokens, and each part of the stored pages of
each group, zeroed with a renewed checksum, changes log-probabilities. `K of 3` means: the keys of each of 3 groups.

A next turn comes back to its answer's last chunk. Where a group is RECURRENT the engine keeps no state inside an answer
of itself, so its own hit is one that it has when told to keep them."""
_MAMBA2 = """\
Mamba-2 families: vLLM 0.32's CPU build cannot run them with prefix caching, with or without a connector. Its scan
returns the last state of a sequence where the layer asks for the states at all chunk ends, and the first step that
goes beyond a block's end to a prompt's end stops the engine with an IndexError in `mamba_mixer2.py`. The test puts a
scan that returns them in its place (`tests/zoo/mamba2_cpu.py`); all else is vLLM's. Their next turn is computed in
other steps than the engine's own, which stops at the end of the last turn to keep the state there: its bytes are equal,
and its log-probabilities as near as the engine's own runs in other steps are to each other."""
_STEPS = """\
What a cold run says counts only where plain vLLM equals itself. `//tests/zoo:steps_test`, in the full run, asks each of
these families without a connector and without prefix caching: in one step, in steps of 64 and of 96 tokens, and beside
another request. Answers in float32 deviate by at most 0.001 in log-probabilities, mostly by nothing, and of Qwen3-Next
in bfloat16 by at most 0.3.

LFM2 does so only with `--compilation-config '{"custom_ops": ["-rotary_embedding"]}'` (or `["none"]`), and its row is of
that setting. The kernel for rotary embeddings of vLLM 0.32's CPU build takes queries and keys for tokens by numbers;
LFM2 hands it tokens by heads by numbers, so tokens overlap. As it comes its answers move by one to four nats with the
size of steps and with the batch, without any connector too. Default `checkpoints` change the steps of a cold run, so
they move its answers there with nothing restored. No other family here is touched."""
_REFUSED = """\
## Refused

The engine does not start with the connector, and its error says why."""
_AMX = """\
Without AMX vLLM's CPU kernels for latent attention cannot resume a prefix. With AMX they can, and the test then demands
of DeepSeek-V3 what it demands of the models above."""


def main(path: str) -> None:
    sys.stdout.write(render(read_rows(Path(path))))


def render(rows: Mapping[str, Row]) -> str:
    """The page. Every family must have its row.

    Raises:
        ValueError: a family's row is missing or incomplete.
    """
    missing = [family.name for family in FAMILIES if family.name not in rows or not rows[family.name].is_complete]
    if missing:
        raise ValueError(f"no complete row of {', '.join(missing)}: the page is written from a whole run that passed")
    served = [family for family in FAMILIES if not rows[family.name].refusal]
    refused = [family for family in FAMILIES if rows[family.name].refusal]
    parts = [
        _TITLE,
        _INTRODUCTION,
        _SERVED.format(answer=ANSWER_TOKENS),
        "\n".join(
            [
                "| model | groups | chunk | came back | next turn | four at once | zeroing shows |",
                "| --- | --- | --- | --- | --- | --- | --- |",
                *(line(family, rows[family.name]) for family in served),
            ]
        ),
        _STEPS,
        _MAMBA2,
        _REFUSED,
        "\n".join(["| model | why |", "| --- | --- |", *(line(family, rows[family.name]) for family in refused)]),
        _AMX,
    ]
    return "\n\n".join(parts) + "\n"


def line(family: Family, row: Row) -> str:
    """The family's line in its table."""
    model = f"{family.title}: {family.note}" if family.note else family.title
    if row.refusal:
        return f"| {model} | {row.refusal} |"
    assert row.next_turn is not None
    [together] = {tuple(pair) for pair in row.at_once}
    cells = [
        model,
        row.groups,
        str(row.chunk_tokens),
        ", ".join(_of(*pair) for pair in row.restored),
        _of(*row.next_turn),
        _of(*together),
        ", ".join(row.controls),
    ]
    return "| " + " | ".join(cells) + " |"


def depends_on_machine(family: Family) -> bool:
    """Whether another machine may see another row."""
    return family.resumable is Resumable.WITH_AMX or family.names_machine


def _of(hit: int, length: int) -> str:
    return f"{hit} of {length}"


if __name__ == "__main__":
    main(sys.argv[1])
