"""Plain vLLM, without a connector and without prefix caching, gives the same output in any step sizes.

Otherwise a comparison of a restored prefix with a cold run proves nothing. A family with different output runs in a
setting that makes the output equal, and its row names the setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import trial as trials
from families import FAMILIES, PROMPT_TOKENS, Family
from harness import Engine, Result, make_prompt
from noise import deviation

STEP_TOKENS: Final = (64, 96)
ONE_STEP: Final = 1024
TOLERANCES: Final = {"float32": 1e-3, "bfloat16": 0.3}
"""Of a log-probability, averaged over a few tokens."""
PROMPTS: Final = [make_prompt(length, seed=length) for length in PROMPT_TOKENS]


def farthest(family: Family, directory: Path, arguments: Mapping[str, Any]) -> float:
    """The largest deviation of answers computed in small steps, or beside another request, from those in one step."""
    plain = {"enable_prefix_caching": False, "max_num_batched_tokens": ONE_STEP} | arguments
    with trials.running_engine(family, directory, None, plain) as (engine, _):
        whole = answers(engine, ONE_STEP)
        others = [answers(engine, tokens) for tokens in STEP_TOKENS]
        assert [len(result.steps) for result in whole] == [len(whole[0].token_ids)] * len(PROMPTS)
        assert all(len(result.steps) > len(result.token_ids) for each in others for result in each)
        together = engine.generate(PROMPTS)
        assert all(len(result.steps[-1].batch) == len(PROMPTS) for result in together)
    return max(deviation(*pair) for other in (*others, together) for pair in zip(whole, other, strict=True))


def answers(engine: Engine, step_tokens: int) -> list[Result]:
    """Runs each prompt alone, in steps of at most this many tokens."""
    usual = engine.scheduler.max_num_scheduled_tokens
    engine.scheduler.max_num_scheduled_tokens = step_tokens
    try:
        return [engine.generate([prompt])[0] for prompt in PROMPTS]
    finally:
        engine.scheduler.max_num_scheduled_tokens = usual


def test_the_output_of_a_family_does_not_depend_on_step_sizes(family: Family, directory: Path) -> None:
    found = farthest(family, directory, {})
    print(f"{family.name}: {found}")
    assert found <= TOLERANCES[family.arguments["dtype"]]


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if family.needs and family.served_here(trials.has_amx())],
    ids=lambda family: family.name,
)
def test_a_family_that_needs_a_setting_depends_on_step_sizes_without_it(family: Family, directory: Path) -> None:
    """The control. If it fails, vLLM has fixed the defect: remove the setting, and its description on the page."""
    found = farthest(family, directory, {name: {} for name in family.needs})
    print(f"{family.name} as it comes: {found}")
    assert found > 1.0


def test_the_cpu_rotary_kernel_is_wrong_if_heads_are_a_dimension(directory: Path) -> None:
    """The reason for the setting of two families: tokens overlap, so the output depends on their number in a step."""
    from vllm._custom_ops import rotary_embedding
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    tokens, heads, size = 64, 4, 32
    draw = torch.Generator().manual_seed(1)
    query, angles = torch.randn((tokens, heads, size), generator=draw), torch.randn((tokens, size), generator=draw)
    cosines, sines = (each[:, None] for each in angles.chunk(2, dim=-1))
    first, second = query.chunk(2, dim=-1)
    expected = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    is_right = []
    for shape in ((tokens, heads * size), (tokens, heads, size)):
        turned = query.reshape(shape).clone()
        rotary_embedding(torch.arange(tokens), turned, turned.clone(), size, angles, True)
        is_right.append(torch.allclose(turned.view_as(expected), expected, atol=1e-5))
    assert is_right == [True, False]
