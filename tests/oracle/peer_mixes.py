"""Pairs of engines that exchange KV: mixes of groups that may differ in block sizes and in tensor-parallel sizes.

The CPU's attention backend packs the tokens of a block in its own way, so engines here would refuse other block sizes.
The oracle's memory is laid out as a GPU's; `as_on_a_gpu` declares that, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from hypothesis import strategies as st

from hybridkv.connectors.vllm.common.specs import cuts
from oracle.mixes import GEMMA3, GPT_OSS, HEADS_BEFORE_LAYERS, LLAMA4, NAMED, QWEN3_NEXT, Group, Kind, Layers, Mix
from oracle.scenarios import mixes

if TYPE_CHECKING:
    import pytest

MODEL_HEADS: Final = 4
"""Total number of heads of the model of `oracle.settings`."""
HEAD_BYTES: Final = 16
"""Per token, unless the mix has another size."""
MLA: Final = Mix("mla", (Group(Kind.FULL, 16, (Layers(2, cell_bytes=24),), latent=True),), layout="BLHNC")
CUT_WINDOWS: Final = Mix(
    "cut_windows",
    (
        Group(Kind.WINDOW, 16, (Layers(1, heads=2),), reach_tokens=24),
        Group(Kind.WINDOW, 16, (Layers(1, heads=2),), reach_tokens=17),
        Group(Kind.FULL, 16, (Layers(1, heads=2),)),
    ),
)
"""Windows that are no multiple of a block."""
ONE_SIZE: Final = (*NAMED, MLA, CUT_WINDOWS, HEADS_BEFORE_LAYERS)


@dataclass(frozen=True, slots=True)
class Sides:
    """Two engines of one model.

    Args:
        mixes: of each; the content of one of its ranks.
        tp_sizes: of each.
        on_a_cpu: its attention packs the tokens of a block.
        refused: the field that is named if they cannot exchange.
    """

    mixes: tuple[Mix, Mix]
    tp_sizes: tuple[int, int] = (1, 1)
    on_a_cpu: bool = False
    refused: str = ""

    @property
    def name(self) -> str:
        ours, theirs = self.mixes
        ranks = "" if self.tp_sizes == (1, 1) else f"-ranks{self.tp_sizes[0]}to{self.tp_sizes[1]}"
        blocks = "" if self.has_equal_blocks else f"-blocks{ours.alignment_tokens}to{theirs.alignment_tokens}"
        layouts = "" if ours.layout == theirs.layout else f"-{ours.layout}to{theirs.layout}"
        return f"{ours.name}{blocks}{ranks}{layouts}"

    @property
    def has_equal_blocks(self) -> bool:
        sizes = [[group.block_tokens for group in mix.groups] for mix in self.mixes]
        return sizes[0] == sizes[1]


def alike(mix: Mix) -> Sides:
    return Sides((mix, mix))


def with_blocks(mix: Mix, ratio: int) -> Mix:
    """The same model with blocks `ratio` times as long. A state is as long as before, and its page as any other."""
    return replace(
        mix,
        groups=tuple(
            replace(
                group,
                block_tokens=group.block_tokens * ratio,
                kernel_tokens=None,
                page_bytes=group.page_bytes and group.page_bytes * ratio,
            )
            for group in mix.groups
        ),
    )


def with_heads(mix: Mix, heads: int) -> Mix:
    """The same model with so many heads per rank; pages of states are as long as those of the others."""
    groups = []
    for group in mix.groups:
        if group.latent:
            groups.append(group)
        elif group.kind is Kind.RECURRENT:
            page_bytes = group.block_tokens * heads * HEAD_BYTES
            state = replace(group.layers[0], cell_bytes=page_bytes - 120)
            groups.append(replace(group, layers=(state,), page_bytes=page_bytes))
        else:
            groups.append(replace(group, layers=tuple(replace(layer, heads=heads) for layer in group.layers)))
    return replace(mix, groups=tuple(groups))


def of_ranks(mix: Mix, ours: int, theirs: int) -> Sides:
    sides = with_heads(mix, MODEL_HEADS // ours), with_heads(mix, MODEL_HEADS // theirs)
    return Sides(sides, (ours, theirs))


UNEQUAL_BLOCKS: Final = tuple(
    Sides(pair)
    for mix in (GEMMA3, GPT_OSS, CUT_WINDOWS, QWEN3_NEXT)
    for ratio in (2, 3)
    for pair in ((mix, with_blocks(mix, ratio)), (with_blocks(mix, ratio), mix))
)
UNEQUAL_RANKS: Final = tuple(of_ranks(mix, *sizes) for mix in (GEMMA3, GPT_OSS) for sizes in ((2, 1), (1, 2), (4, 2)))
EQUAL_RANKS: Final = (of_ranks(QWEN3_NEXT, 2, 2), of_ranks(GPT_OSS, 2, 2), Sides((MLA, MLA), (2, 2)))


def of_layouts(mix: Mix, ours: str, theirs: str) -> Sides:
    plain = with_heads(with_blocks(mix, 1), 2)
    return Sides((replace(plain, layout=ours), replace(plain, layout=theirs)))


LAYOUTS: Final = (("LBHNC", "BLHNC"), ("BLHNC", "BHLNC"), ("BHLNC", "LBHNC"))
UNEQUAL_LAYOUTS: Final = (
    *(of_layouts(mix, *pair) for mix in (GPT_OSS, CUT_WINDOWS) for pair in LAYOUTS),
    of_layouts(LLAMA4, "LBHNC", "BLHNC"),
    of_layouts(QWEN3_NEXT, "BLHNC", "LBHNC"),
)
REFUSED: Final = (
    replace(of_layouts(LLAMA4, "LBHNC", "BHLNC"), refused="pieces"),
    Sides((LLAMA4, with_blocks(LLAMA4, 2)), refused="item_format"),
    Sides((MLA, with_blocks(MLA, 2)), refused="item_format"),
    Sides((GPT_OSS, with_blocks(GPT_OSS, 2)), on_a_cpu=True, refused="item_format"),
    replace(of_ranks(QWEN3_NEXT, 1, 2), refused="tp_size"),
    replace(of_ranks(LLAMA4, 2, 1), refused="tp_size"),
    Sides((with_heads(GPT_OSS, 1), with_heads(GPT_OSS, 2)), refused="heads"),
    Sides(
        (GPT_OSS, replace(GPT_OSS, groups=(replace(GPT_OSS.groups[0], reach_tokens=10), GPT_OSS.groups[1]))),
        refused="window",
    ),
)


def random_sides() -> st.SearchStrategy[Sides]:
    return mixes().map(alike)


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuts, "DIVISIBLE_BACKENDS", frozenset({cuts.backend_name(None)}))
