"""Hints of requests are applied or ignored, whatever they contain, and never harm the engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.compat import MAX_HINT_ACTIONS
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.hints import MAX_KEEP_SECONDS, WARNING_EVERY_S, HintReader, parse
from hybridkv.metrics import Counts
from hybridkv.planner.hints import NO_HINTS, Hints

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
said = st.dictionaries(
    st.sampled_from(["store", "load", "keep_seconds", "prefetch", "kep_seconds"]) | st.text(max_size=5), json_values
)


class Reader:
    """Hint reader with its counts and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.metrics = ConnectorMetrics()
        self.reader = HintReader(self.metrics, lambda: self.now_s)

    def read(self, params: object = None, hints: object = None) -> Hints:
        return self.reader.read(SimpleNamespace(request_id="r", kv_transfer_params=params, kv_hints=hints))

    def counted(self) -> dict[str, float]:
        stats = self.metrics.take()
        if stats is None:
            return {}
        counters = Counts.from_dict(stats.data).data().counters
        return {labels[0]: value for name, labels, value in counters if name == "vllm:hybridkv_hints_total"}


def envelope(*payloads: Any, action_type: str = "hybridkv_hints") -> KvHintsEnvelope:
    return KvHintsEnvelope("1", "m", [KvHintAction(str(i), action_type, "1", each) for i, each in enumerate(payloads)])


def test_hints_are_read_and_counted() -> None:
    bench = Reader()
    assert bench.read({"hybridkv_hints": {"store": False, "keep_seconds": 5}}) == Hints(store=False, keep_seconds=5.0)
    assert bench.read({"hybridkv_hints": {"load": False}}) == Hints(load=False)
    assert bench.read({"hybridkv_hints": {"prefetch": True}}) == Hints(prefetch=True)
    assert bench.read({"hybridkv_hints": {"prefetch": False}}) == NO_HINTS
    assert bench.read({"hybridkv_hints": {}}) == NO_HINTS
    assert bench.counted() == {"no_store": 1, "keep": 1, "no_load": 1, "prefetch": 1}


@pytest.mark.parametrize(
    "params", [None, {}, "text", ["hybridkv_hints"], 7, {"do_remote_prefill": True, "hybridkv": {}}]
)
def test_parameters_without_hints_are_ignored(params: object) -> None:
    bench = Reader()
    assert bench.read(params) is NO_HINTS
    assert bench.counted() == {}


def test_only_our_hints_of_the_engines_envelope_are_read() -> None:
    bench = Reader()
    assert bench.read(None, envelope({"load": False})) == Hints(load=False)
    assert bench.read(None, envelope({"anything": 1}, action_type="other")) is NO_HINTS
    assert bench.counted() == {"no_load": 1}


def test_several_hints_are_merged_to_the_most_cautious() -> None:
    bench = Reader()
    hints = envelope({"keep_seconds": 9.5, "prefetch": True}, {"store": False, "keep_seconds": 2, "prefetch": False})
    merged = Hints(store=False, load=False, keep_seconds=9.5, prefetch=True)
    assert bench.read({"hybridkv_hints": {"load": False}}, hints) == merged


def test_max_hint_actions_is_not_exceeded() -> None:
    bench = Reader()
    assert bench.read(None, envelope(*[{}] * MAX_HINT_ACTIONS, {"load": False})) == NO_HINTS


@pytest.mark.parametrize(
    ("hints", "path", "expected", "got", "hint"),
    [
        ("store", "", "an object", "str", "hints.md"),
        ({"stor": False}, ".stor", "a known key", "an unknown one", 'did you mean "store"'),
        ({"store": "no"}, ".store", "true or false", "'no'", "hints.md"),
        ({"store": 0}, ".store", "true or false", "0", "hints.md"),
        ({"prefetch": 1}, ".prefetch", "true or false", "1", "hints.md"),
        ({"prefetc": True}, ".prefetc", "a known key", "an unknown one", 'did you mean "prefetch"'),
        ({"keep_seconds": -1}, ".keep_seconds", "seconds from 0", "-1", "hints.md"),
        ({"keep_seconds": MAX_KEEP_SECONDS + 1}, ".keep_seconds", "seconds from 0", "604801", "hints.md"),
        ({"keep_seconds": float("nan")}, ".keep_seconds", "seconds from 0", "nan", "hints.md"),
        ({"keep_seconds": "5"}, ".keep_seconds", "seconds from 0", "'5'", "hints.md"),
        ({1: 2}, ".1", "a known key", "an unknown one", "known: store, load"),
    ],
)
def test_a_mistake_is_reported_with_path_expected_got_and_hint(
    hints: object, path: str, expected: str, got: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse("here", hints)
    assert caught.value.path == "here" + path
    assert expected in caught.value.expected and got in str(caught.value.got) and hint in caught.value.hint


def test_one_mistake_ignores_all_hints_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    bench = Reader()
    with caplog.at_level(logging.WARNING, "vllm.hybridkv.scheduler"):
        assert bench.read({"hybridkv_hints": {"store": False, "other": 1}}) is NO_HINTS
    assert bench.counted() == {"invalid": 1}
    assert "kv_transfer_params.hybridkv_hints.other: expected a known key" in caplog.text


def test_mistakes_are_always_counted_and_sometimes_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Reader()
    with caplog.at_level(logging.WARNING, "vllm.hybridkv.scheduler"):
        for _ in range(5):
            bench.read({"hybridkv_hints": 1})
        bench.now_s = WARNING_EVERY_S
        bench.read({"hybridkv_hints": 1})
    assert bench.counted() == {"invalid": 6}
    assert len(caplog.records) == 2


def test_control_characters_and_long_text_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Reader()
    with caplog.at_level(logging.WARNING, "vllm.hybridkv.scheduler"):
        bench.read({"hybridkv_hints": {"a\nERROR forged" + "x" * 10**6: 1}})
        bench.now_s = WARNING_EVERY_S
        bench.read({"hybridkv_hints": {"store": "y" * 10**6}})
    assert len(caplog.records) == 2
    assert all(len(each.getMessage()) < 1000 and "\n" not in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize(
    "hints",
    [{"store": 10**5000}, {"keep_seconds": 10**5000}, {10**5000: 1}, {"store": "\ud800"}, {"\ud800": 1}],
    ids=["number", "seconds", "name", "half a character", "half a name"],
)
def test_hints_that_cannot_be_printed_are_ignored(hints: object) -> None:
    bench = Reader()
    assert bench.read({"hybridkv_hints": hints}) is NO_HINTS
    assert bench.counted() == {"invalid": 1}


@settings(max_examples=examples(100, 8))
@given(st.one_of(json_values, said, st.dictionaries(st.just("hybridkv_hints"), json_values | said)))
def test_any_hints_are_applied_or_ignored(params: object) -> None:
    bench = Reader()
    hints = bench.read(params, envelope(params) if isinstance(params, dict) else params)
    assert type(hints.store) is type(hints.load) is type(hints.prefetch) is bool
    assert 0 <= hints.keep_seconds <= MAX_KEEP_SECONDS
    if "invalid" in bench.counted():
        assert hints is NO_HINTS
