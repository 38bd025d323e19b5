"""Transfer parameters survive a proxy, and no change by a proxy is accepted as more than it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridkv.connectors.vllm.nixl.params import (
    MAX_RANKS,
    OURS,
    ParamsError,
    RankAddress,
    RemotePrompt,
    compose,
    is_remote_decode,
    is_remote_prefill,
    parse,
)
from hybridkv.peers.leases import MAX_NONCE, Lease

NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=40)
BLOCKS = st.lists(st.integers(0, 1 << 30), max_size=8).map(tuple)
GROUPS = st.integers(1, 6)
PATIENT = settings(max_examples=examples(100, 5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def prompts(draw: st.DrawFn) -> RemotePrompt:
    count, num_tokens = draw(GROUPS), draw(st.integers(0, 1 << 20))
    return RemotePrompt(
        engine_id=draw(NAMES),
        request_id=draw(NAMES),
        host=draw(NAMES),
        ranks=tuple(draw(st.lists(st.builds(RankAddress, st.integers(1, 65535), NAMES), min_size=1, max_size=4))),
        num_tokens=num_tokens,
        block_ids=tuple(draw(BLOCKS) for _ in range(count)),
        first_blocks=tuple(draw(st.integers(0, 1 << 20)) for _ in range(count)),
        block_tokens=tuple(draw(st.integers(1, 4096)) for _ in range(count)),
        lease=Lease(draw(st.integers(0, 1 << 16)), draw(st.integers(1, MAX_NONCE))),
        lease_seconds=draw(st.floats(0.001, 1e6)),
        prefix_tokens=draw(st.integers(0, num_tokens)),
        prefix=draw(NAMES),
    )


def carried(prompt: RemotePrompt) -> dict[str, Any]:
    params: dict[str, Any] = json.loads(json.dumps(compose(prompt)))
    return params


@PATIENT
@given(prompts())
def test_json_loses_nothing(prompt: RemotePrompt) -> None:
    assert parse(carried(prompt)) == prompt


@PATIENT
@given(prompts())
def test_a_proxy_that_reads_numbers_as_floating_point_loses_nothing(prompt: RemotePrompt) -> None:
    """Integers beyond 2**53 would change."""

    def largest(value: Any) -> int:
        if isinstance(value, dict):
            return max([0, *map(largest, value.values())])
        if isinstance(value, list):
            return max([0, *map(largest, value)])
        return value if isinstance(value, int) else 0

    assert largest(carried(prompt)) < 1 << 53


@PATIENT
@given(prompts(), JUNK)
def test_unknown_keys_are_ignored(prompt: RemotePrompt, junk: Any) -> None:
    params = carried(prompt)
    params["x"], params[OURS]["x"], params["transfer_mode"] = junk, junk, junk
    assert parse(params) == prompt


@PATIENT
@given(prompts(), st.data())
def test_a_changed_value_is_accepted_consistently_or_refused(prompt: RemotePrompt, data: st.DataObject) -> None:
    params = carried(prompt)
    holder = data.draw(st.sampled_from([params, params[OURS]]))
    holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(JUNK)
    try:
        found = parse(params)
    except ParamsError:
        return
    assert len(found.block_ids) == len(found.first_blocks) == len(found.block_tokens)
    assert found.ranks and 0 < found.lease.nonce <= MAX_NONCE and found.prefix_tokens <= found.num_tokens


@pytest.mark.parametrize("key", ["remote_block_ids", "remote_num_tokens", "remote_host", "remote_request_id", OURS])
@PATIENT
@given(prompt=prompts())
def test_a_missing_key_is_named(key: str, prompt: RemotePrompt) -> None:
    params = carried(prompt)
    del params[key]
    with pytest.raises(ParamsError) as caught:
        parse(params)
    assert caught.value.key == key


@pytest.mark.parametrize("name", ["a\nb", "\0", "\ud800", "\x1b[2J", "\u202e", "", "x" * 513, 7, None])
@pytest.mark.parametrize("key", ["remote_host", "remote_engine_id", "remote_request_id", "prefix", "ranks"])
@settings(PATIENT, max_examples=2)
@given(prompt=prompts())
def test_a_name_must_be_printable(key: str, name: Any, prompt: RemotePrompt) -> None:
    """It is logged, and sent to every rank."""
    params = carried(prompt)
    if key == "ranks":
        params[OURS][key][0][1] = name
    else:
        (params if key.startswith("remote") else params[OURS])[key] = name
    with pytest.raises(ParamsError) as caught:
        parse(params)
    assert caught.value.key.endswith(key) and str(caught.value).isprintable()


@PATIENT
@given(prompts())
def test_a_request_opens_at_most_max_ranks_connections(prompt: RemotePrompt) -> None:
    params = carried(prompt)
    rank = params[OURS]["ranks"][0]
    params[OURS]["ranks"] = [rank] * MAX_RANKS
    assert len(parse(params).ranks) == MAX_RANKS
    params[OURS]["ranks"] = [rank] * (MAX_RANKS + 1)
    with pytest.raises(ParamsError, match=f"at most {MAX_RANKS}") as caught:
        parse(params)
    assert caught.value.key == f"{OURS}.ranks" and MAX_RANKS <= 64


def test_another_version_is_refused() -> None:
    params: dict[str, Any] = {OURS: {"version": 2}}
    with pytest.raises(ParamsError, match="version"):
        parse(params)


def test_a_producer_of_another_connector_is_refused() -> None:
    with pytest.raises(ParamsError, match="another connector"):
        parse({"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e"})


@pytest.mark.parametrize(
    "value", [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": "yes"}, 0, "", [], "x", 7, ["x"]], ids=repr
)
def test_params_without_a_remote_transfer_are_ignored(value: Any) -> None:
    assert not is_remote_prefill(value) and not is_remote_decode(value)
