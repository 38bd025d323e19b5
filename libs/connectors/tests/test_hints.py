"""What a request says of itself is understood or passed over, whatever it is, and never harms the engine."""

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
    """A reader, what it counted, and the clock it reads."""

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
    it = Reader()
    assert it.read({"hybridkv_hints": {"store": False, "keep_seconds": 5}}) == Hints(store=False, keep_seconds=5.0)
    assert it.read({"hybridkv_hints": {"load": False}}) == Hints(load=False)
    assert it.read({"hybridkv_hints": {"prefetch": True}}) == Hints(prefetch=True)
    assert it.read({"hybridkv_hints": {"prefetch": False}}) == NO_HINTS
    assert it.read({"hybridkv_hints": {}}) == NO_HINTS
    assert it.counted() == {"no_store": 1, "keep": 1, "no_load": 1, "prefetch": 1}


@pytest.mark.parametrize(
    "params", [None, {}, "text", ["hybridkv_hints"], 7, {"do_remote_prefill": True, "hybridkv": {}}]
)
def test_what_is_for_others_is_not_looked_at(params: object) -> None:
    it = Reader()
    assert it.read(params) is NO_HINTS
    assert it.counted() == {}


def test_the_engines_own_hints_are_read_and_those_of_others_are_not() -> None:
    it = Reader()
    assert it.read(None, envelope({"load": False})) == Hints(load=False)
    assert it.read(None, envelope({"anything": 1}, action_type="other")) is NO_HINTS
    assert it.counted() == {"no_load": 1}


def test_of_several_hints_the_most_cautious_holds() -> None:
    it = Reader()
    hints = envelope({"keep_seconds": 9.5, "prefetch": True}, {"store": False, "keep_seconds": 2, "prefetch": False})
    merged = Hints(store=False, load=False, keep_seconds=9.5, prefetch=True)
    assert it.read({"hybridkv_hints": {"load": False}}, hints) == merged


def test_no_more_actions_are_looked_at_than_may_be() -> None:
    it = Reader()
    assert it.read(None, envelope(*[{}] * MAX_HINT_ACTIONS, {"load": False})) == NO_HINTS


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


def test_one_mistake_passes_all_hints_of_the_request_over(caplog: pytest.LogCaptureFixture) -> None:
    it = Reader()
    with caplog.at_level(logging.WARNING, "vllm.hybridkv.scheduler"):
        assert it.read({"hybridkv_hints": {"store": False, "other": 1}}) is NO_HINTS
    assert it.counted() == {"invalid": 1}
    assert "kv_transfer_params.hybridkv_hints.other: expected a known key" in caplog.text


def test_the_log_says_so_now_and_then_and_the_count_always(caplog: pytest.LogCaptureFixture) -> None:
    it = Reader()
    with caplog.at_level(logging.WARNING, "vllm.hybridkv.scheduler"):
        for _ in range(5):
            it.read({"hybridkv_hints": 1})
        it.now_s = WARNING_EVERY_S
        it.read({"hybridkv_hints": 1})
    assert it.counted() == {"invalid": 6}
    assert len(caplog.records) == 2


def test_what_cannot_be_printed_or_is_long_does_not_come_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    it = Reader()
    with caplog.at_level(logging.WARNING, "vllm.hybridkv.scheduler"):
        it.read({"hybridkv_hints": {"a\nERROR forged" + "x" * 10**6: 1}})
        it.now_s = WARNING_EVERY_S
        it.read({"hybridkv_hints": {"store": "y" * 10**6}})
    assert len(caplog.records) == 2
    assert all(len(each.getMessage()) < 1000 and "\n" not in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize(
    "hints",
    [{"store": 10**5000}, {"keep_seconds": 10**5000}, {10**5000: 1}, {"store": "\ud800"}, {"\ud800": 1}],
    ids=["number", "seconds", "name", "half a character", "half a name"],
)
def test_what_cannot_even_be_shown_is_passed_over(hints: object) -> None:
    it = Reader()
    assert it.read({"hybridkv_hints": hints}) is NO_HINTS
    assert it.counted() == {"invalid": 1}


@settings(max_examples=examples(100, 8))
@given(st.one_of(json_values, said, st.dictionaries(st.just("hybridkv_hints"), json_values | said)))
def test_whatever_is_said_is_understood_or_passed_over(params: object) -> None:
    it = Reader()
    hints = it.read(params, envelope(params) if isinstance(params, dict) else params)
    assert type(hints.store) is type(hints.load) is type(hints.prefetch) is bool
    assert 0 <= hints.keep_seconds <= MAX_KEEP_SECONDS
    if "invalid" in it.counted():
        assert hints is NO_HINTS
