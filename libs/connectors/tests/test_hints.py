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

from hybridkv.connectors.config import PeerTierConfig
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.compat import MAX_HINT_ACTIONS
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.hints import (
    MAX_HINTED_PEERS,
    MAX_KEEP_SECONDS,
    WARNING_EVERY_S,
    HintReader,
    parse,
)
from hybridkv.connectors.vllm.offload.tiers import hinted_peers
from hybridkv.metrics import Counts
from hybridkv.planner.hints import NO_HINTS, Hints

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
addresses = st.sampled_from(["10.0.0.7:7900", "[::1]:1", "engine-7:7900", "10.0.0.7:0", "a b:1", "0x7f.1:9"])
said = st.dictionaries(
    st.sampled_from(["store", "load", "keep_seconds", "prefetch", "peers", "kep_seconds"]) | st.text(max_size=5),
    json_values | st.lists(addresses | st.text(max_size=9), max_size=10),
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
        ({"peers": "10.0.0.7:7900"}, ".peers", "a list of at most 8", "10.0.0.7:7900", "hints.md"),
        ({"peers": {"10.0.0.7": 7900}}, ".peers", "a list of at most 8", "7900", "hints.md"),
        ({"peers": ["10.0.0.7:7900"] * 10_000}, ".peers", "a list of at most 8", "7900", "hints.md"),
        ({"peers": ["10.0.0.7:7900", 7900]}, ".peers[1]", "str", "7900", "hints.md"),
        ({"peers": ["10.0.0.7"]}, ".peers[0]", "HOST:PORT", "'10.0.0.7'", "routers.md"),
        ({"peers": ["10.0.0.7:0"]}, ".peers[0]", "HOST:PORT", "'10.0.0.7:0'", "routers.md"),
        ({"peers": ["10.0.0.7:65536"]}, ".peers[0]", "HOST:PORT", "'10.0.0.7:65536'", "routers.md"),
        ({"peers": ["host name:7900"]}, ".peers[0]", "HOST:PORT", "'host name:7900'", "routers.md"),
        ({"peers": ["tcp://10.0.0.7:7900"]}, ".peers[0]", "HOST:PORT", "tcp", "routers.md"),
        ({"peers": ["user@engine:7900"]}, ".peers[0]", "HOST:PORT", "user@engine", "routers.md"),
        ({"peers": ["10.7:7900"]}, ".peers[0]", "HOST:PORT", "10.7", "routers.md"),
        ({"peers": ["e" * 300 + ":7900"]}, ".peers[0]", "HOST:PORT", "eee", "routers.md"),
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


def allowing(*hosts: str) -> Reader:
    """A reader of an engine with one listed peer and these allowed hosts."""
    bench = Reader()
    tier = PeerTierConfig(listen="10.0.0.1:7900", peers=("Engine-2:7900", "10.0.0.3:7900"), allowed_hosts=hosts)
    bench.reader.allows_peer = hinted_peers(tier)
    return bench


def test_listed_peers_and_allowed_hosts_may_be_hinted() -> None:
    bench = allowing("10.1.0.0/16", "fd00::/8", "engine-9")
    hints = {"peers": ["ENGINE-2.:7900", "10.1.2.3:1", "[fd00:0::7]:7900", "[::ffff:10.1.2.3]:1", "Engine-9:5"]}
    peers = (("engine-2", 7900), ("10.1.2.3", 1), ("fd00::7", 7900), ("engine-9", 5))
    assert bench.read({"hybridkv_hints": hints}) == Hints(peers=peers)
    assert bench.read(None, envelope(hints, {"peers": ["10.0.0.3:7900"]})).peers == (*peers, ("10.0.0.3", 7900))
    assert bench.counted() == {"peers": 2}


def test_several_hints_together_name_at_most_eight_peers() -> None:
    bench = allowing("10.0.0.0/8")
    hints = [{"peers": [f"10.0.{number}.{i}:1" for i in range(MAX_HINTED_PEERS)]} for number in range(3)]
    assert bench.read(None, envelope(*hints)).peers == tuple((f"10.0.0.{i}", 1) for i in range(MAX_HINTED_PEERS))


@pytest.mark.parametrize(
    "peer",
    [
        "10.0.0.3:7901",
        "10.2.0.1:7900",
        "engine-3:7900",
        "localhost:7900",
        "127.0.0.1:7900",
        "[::1]:7900",
        "0.0.0.0:7900",
        "[::ffff:169.254.169.254]:80",
    ],
)
def test_a_peer_that_is_not_allowed_is_refused_and_other_hints_apply(
    peer: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = allowing("10.1.0.0/16")
    with caplog.at_level(logging.WARNING, "vllm.hybridkv.scheduler"):
        for _ in range(3):
            hints = bench.read({"hybridkv_hints": {"peers": [peer, "10.1.0.1:1"], "store": False}})
            assert hints == Hints(store=False, peers=(("10.1.0.1", 1),))
            assert bench.read({"hybridkv_hints": {"peers": [peer]}}) == NO_HINTS
    assert bench.counted() == {"peers_refused": 6, "peers": 3, "no_store": 3}
    [record] = caplog.records
    assert "allowed_hosts" in record.getMessage() and "routers.md" in record.getMessage()


@pytest.mark.parametrize("peer", ["0.0.0.0:7900", "[::]:7900", "[::ffff:0.0.0.0]:7900"])
def test_a_wildcard_address_is_refused_in_any_allowed_network(peer: str) -> None:
    bench = allowing("0.0.0.0/0", "::/0")
    assert bench.read({"hybridkv_hints": {"peers": [peer, "10.0.0.9:1"]}}) == Hints(peers=(("10.0.0.9", 1),))


def test_a_name_with_two_final_dots_is_invalid() -> None:
    bench = allowing("engine-7")
    assert bench.read({"hybridkv_hints": {"peers": ["engine-7..:1"]}}) is NO_HINTS
    assert bench.read({"hybridkv_hints": {"peers": ["engine-7.:1"]}}) == Hints(peers=(("engine-7", 1),))


def test_control_characters_of_a_request_id_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = allowing()
    with caplog.at_level(logging.WARNING, "vllm.hybridkv.scheduler"):
        for hints in ({"peers": ["10.9.9.9:1"]}, {"store": 1}):
            params = {"hybridkv_hints": hints}
            bench.reader.read(SimpleNamespace(request_id="r\nERROR forged", kv_transfer_params=params, kv_hints=None))
    assert len(caplog.records) == 2
    assert all("\n" not in each.getMessage() for each in caplog.records)


def test_an_engine_without_a_peer_tier_uses_no_peer() -> None:
    bench = Reader()
    assert bench.read({"hybridkv_hints": {"peers": ["127.0.0.1:7900"]}}) == NO_HINTS
    assert bench.counted() == {"peers_refused": 1}


@pytest.mark.parametrize(
    "hints",
    [
        {"store": 10**5000},
        {"keep_seconds": 10**5000},
        {10**5000: 1},
        {"store": "\ud800"},
        {"\ud800": 1},
        {"peers": ["\ud800:1"]},
    ],
    ids=["number", "seconds", "name", "half a character", "half a name", "half a host"],
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
    assert hints.peers == ()
    if "invalid" in bench.counted():
        assert hints is NO_HINTS
