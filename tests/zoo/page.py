"""Writes the reference page of models: `python page.py rows.json > docs/reference/models.md`.

The rows are what a run of the zoo saw; Bazel keeps them among the test's undeclared outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from families import ANSWER_TOKENS, FAMILIES, Family, Resumable
from rows import Row, read_rows

_TITLE = "# Models"
_INTRODUCTION = """\
`tests/zoo/page.py` generates this page from a run of `//tests/zoo:zoo_test`: tiny random models with the layers and
groups of their families, on vLLM's CPU build. [Groups](../concepts/groups.md) explains the kinds."""
_SERVED = """\
## Served

The engine loses its cache, and the connector restores the prefix. Then the answer equals the answer after the engine's
own hit of the same length: in tokens, in log-probabilities to the last digit, and in every byte of every page. The same
holds for the next turn of a conversation (the last prompt, its answer of {answer} tokens, and 16 more), and for four
requests at once that share prefixes in pairs. As a control, another prefix and each zeroed part of each group's pages
change the answer.

Restored tokens of each prompt: {restored}; of the next turn: {next_turn}; of the four requests: {at_once}."""
_MAMBA2 = """\
vLLM 0.32's CPU build cannot run Mamba-2 families with prefix caching: it stops with an IndexError in `mamba_mixer2.py`.
The test replaces the scan of recurrent states (`tests/zoo/mamba2_cpu.py`). In the next turn of these families, bytes
are equal, and log-probabilities differ no more than in the engine's own runs in other steps."""
_STEPS = """\
Without a connector, steps of other sizes and other requests in the batch change log-probabilities by at most 0.001 in
float32, and of Qwen3-Next in bfloat16 by at most 0.3 (`//tests/zoo:steps_test`).

LFM2, and DeepSeek-V3 with AMX, need `--compilation-config '{"custom_ops": ["-rotary_embedding"]}'` (or `["none"]`).
With the kernel for rotary embeddings of vLLM 0.32's CPU build their answers depend on the size of steps and on the
batch, also without a connector."""
_REFUSED = """\
## Refused

The engine does not start with the connector."""
_AMX = """\
With AMX, vLLM's CPU kernels for latent attention can resume a prefix, and the test expects DeepSeek-V3 to be served."""


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
        _SERVED.format(answer=ANSWER_TOKENS, **_restored(rows, served)),
        "\n".join(
            [
                "| model | groups | chunk |",
                "| --- | --- | --- |",
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
    return f"| {model} | {row.groups} | {row.chunk_tokens} |"


def depends_on_machine(family: Family) -> bool:
    """Whether the row may differ on another machine."""
    return family.resumable is Resumable.WITH_AMX or family.names_machine


def _restored(rows: Mapping[str, Row], served: list[Family]) -> dict[str, str]:
    """Hits and lengths of all prompts, without the families that are refused on some machines."""
    everywhere = [rows[family.name] for family in served if not depends_on_machine(family)]
    return {
        "restored": _list(pair for row in everywhere for pair in row.restored),
        "next_turn": _list(row.next_turn for row in everywhere if row.next_turn),
        "at_once": _list(pair for row in everywhere for pair in row.at_once),
    }


def _list(pairs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{hit} of {length}" for hit, length in sorted({(hit, length) for hit, length in pairs}))


if __name__ == "__main__":
    main(sys.argv[1])
