"""A recurrent state is used by an engine that stores the convolution state in the other order.

Digests are computed after conversion to one order, so equal digests show that every element arrived at its place.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import pytest
from equality import require_close_written
from harness import make_prompt
from peers import Two, require_same_pages, running_two

VARIABLE = "VLLM_SSM_CONV_STATE_LAYOUT"
LENGTHS = (641, 1153)


@pytest.fixture(scope="module", params=[("DS", "SD"), ("SD", "DS")], ids=" to ".join)
def pair(request: pytest.FixtureRequest, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    directory = harness.scratch_directory(tmp_path_factory.mktemp("peers"))
    with running_two(kind, directory, [{VARIABLE: layout} for layout in request.param]) as two:
        assert tuple(each.ask("conv layout") for each in (two.producer, two.consumer)) == request.param
        yield two


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_state_is_converted_to_the_other_layout(pair: Two, num_tokens: int) -> None:
    prompt = make_prompt(num_tokens, seed=num_tokens)
    cold = pair.decode(prompt, None)
    pair.consumer.ask("forget")
    prefilled = pair.prefill(prompt)
    warm = pair.decode(prompt, prefilled["params"])
    assert warm["steps"][0][0] == num_tokens - 1
    require_same_pages(prefilled, warm)
    require_close_written([cold], [warm], pair.tolerance)
    pair.require_rest()


def test_the_raw_bytes_differ_between_layouts(pair: Two) -> None:
    """Control: a transfer that does not convert pages would fail."""
    for each in (pair.producer, pair.consumer):
        each.ask("raw pages", is_on=True)
    try:
        prompt = make_prompt(641, seed=9)
        prefilled = pair.prefill(prompt)
        warm = pair.decode(prompt, prefilled["params"])
        assert warm["steps"][0][0] == 640
        with pytest.raises(AssertionError, match="other pages"):
            require_same_pages(prefilled, warm)
    finally:
        for each in (pair.producer, pair.consumer):
            each.ask("raw pages", is_on=False)
    pair.require_rest()
