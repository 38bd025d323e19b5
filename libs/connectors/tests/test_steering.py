"""Prefill stops: the boundary in the request is always the next stop, and the engine's own boundary is kept."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.prefill_stops import PrefillStops, logger
from hybridkv.planner.checkpoints import Placement, Stop, StopReason

BLOCK, CHUNK = 16, 64


def new_request(num_tokens: int = 400, name: str = "r") -> Request:
    return Request(name, [1] * num_tokens, SamplingParams(max_tokens=9), None)


def placement(*stops: int) -> Placement:
    return Placement(tuple(Stop(stop, StopReason.JUNCTION) for stop in sorted(stops)))


def step(finished: tuple[str, ...] = (), **num_tokens: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens=num_tokens, finished_req_ids=set(finished))


def first_stop(
    prefill_stops: PrefillStops,
    request: Request,
    *placements: Placement,
    own: int = 0,
    start: int = 0,
    loads: bool = False,
) -> int:
    """Boundary of a request after the stops were added, with the engine's own boundary written before."""
    request.shared_prefix_boundary = own
    prefill_stops.begin(request)
    for each in placements:
        prefill_stops.add_stops(request, lambda begins_at, each=each: each, start if loads else 0)
    prefill_stops.end(request, start, is_loaded=loads)
    return request.shared_prefix_boundary


def run(prefill_stops: PrefillStops, request: Request, num_tokens: int) -> int:
    """Run a step; the next stop."""
    prefill_stops.advance(step(**{request.request_id: num_tokens}))
    request.num_computed_tokens += num_tokens
    return request.shared_prefix_boundary


def test_a_prefill_goes_from_stop_to_stop() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    assert first_stop(prefill_stops, request, placement(32, 80, 320)) == 32
    assert [run(prefill_stops, request, num_tokens) for num_tokens in (32, 32, 16, 64)] == [80, 80, 320, 320]


def test_the_engines_boundary_is_one_of_the_stops() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    assert first_stop(prefill_stops, request, placement(32, 320), own=96) == 32
    assert [run(prefill_stops, request, num_tokens) for num_tokens in (32, 64, 32)] == [96, 320, 320]


def test_without_stops_the_boundary_is_unchanged() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    assert first_stop(prefill_stops, request, placement(), own=96) == 96
    assert first_stop(prefill_stops, request, own=0) == 0
    assert run(prefill_stops, request, 32) == 0


def test_a_boundary_is_never_removed() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    first_stop(prefill_stops, request, placement(32), own=0)
    assert [run(prefill_stops, request, num_tokens) for num_tokens in (32, 64, 64)] == [32, 32, 32]


def test_stops_of_several_callers_are_merged_in_order() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    assert first_stop(prefill_stops, request, placement(64, 128), placement(32, 128, 192)) == 32
    assert [run(prefill_stops, request, num_tokens) for num_tokens in (32, 32, 64)] == [64, 128, 192]


def test_the_end_of_a_load_is_a_stop_if_no_other_is_near() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    assert first_stop(prefill_stops, request, placement(64 + CHUNK + BLOCK), start=64, loads=True) == 64
    request.num_computed_tokens = 64
    assert run(prefill_stops, request, CHUNK) == 64 + CHUNK + BLOCK


def test_a_stop_in_the_first_chunk_replaces_the_end_of_the_load() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    assert first_stop(prefill_stops, request, placement(64 + CHUNK), start=64, loads=True) == 64 + CHUNK


def test_a_known_stop_in_the_first_chunk_replaces_the_end_of_the_load() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    guess, known = Stop(64 + BLOCK, StopReason.SPACED), Stop(64 + CHUNK, StopReason.BRANCH)
    far = Stop(320, StopReason.SPACED)
    assert first_stop(prefill_stops, request, Placement((guess, far)), start=64, loads=True) == 64
    request.num_computed_tokens = 64
    assert run(prefill_stops, request, CHUNK) == 320, "a guess after the first chunk is kept"
    assert first_stop(prefill_stops, request, Placement((guess, known)), start=64, loads=True) == 64 + BLOCK
    assert first_stop(prefill_stops, request, Placement((guess,)), own=64 + CHUNK, start=64, loads=True) == 64 + BLOCK


def test_a_load_of_another_connector_adds_no_stop() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    request.shared_prefix_boundary = 48
    prefill_stops.begin(request)
    prefill_stops.add_stops(request, lambda begins_at: placement(begins_at + 256), 0)
    prefill_stops.end(request, 64, is_loaded=True)
    assert request.shared_prefix_boundary == 320


def test_a_restarted_request_has_new_stops_and_a_new_boundary() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    first_stop(prefill_stops, request, placement(32, 96), own=160)
    run(prefill_stops, request, 32)
    request.num_computed_tokens = 0
    assert first_stop(prefill_stops, request, placement(48), own=0) == 48
    assert run(prefill_stops, request, 64) == 48, "neither 96 nor 160, which belong to the first run"


def test_unknown_tokens_do_not_advance_the_stop() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request(100)
    first_stop(prefill_stops, request, placement(32), own=112)
    request.num_computed_tokens = 100
    # The scheduler plans the token after the prompt before it knows the first one.
    assert [run(prefill_stops, request, 1) for _ in range(12)] == [112] * 12


def test_no_stop_is_beyond_the_prompt() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request(100)
    assert first_stop(prefill_stops, request, placement(112)) == 0


def test_a_request_is_forgotten_at_its_end_and_after_its_last_stop() -> None:
    prefill_stops, request, other = PrefillStops(CHUNK), new_request(), new_request(name="other")
    first_stop(prefill_stops, request, placement(32))
    first_stop(prefill_stops, other, placement(32))
    run(prefill_stops, other, 48)
    assert set(prefill_stops._stopping) == {"r"}
    request.status = RequestStatus.FINISHED_ABORTED
    prefill_stops.advance(step(finished=("r",)))
    assert not prefill_stops._stopping


def test_a_new_request_with_the_same_id_is_not_forgotten() -> None:
    prefill_stops, request = PrefillStops(CHUNK), new_request()
    first_stop(prefill_stops, request, placement(32))
    prefill_stops.advance(step(finished=("r",)))
    assert set(prefill_stops._stopping) == {"r"}


def test_an_engine_without_a_boundary_is_not_changed_and_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    prefill_stops = PrefillStops(CHUNK)
    with caplog.at_level("DEBUG", logger=logger.name):
        for name in "ab":
            request: Any = SimpleNamespace(request_id=name, num_tokens=400, num_prompt_tokens=400)
            prefill_stops.begin(request)
            prefill_stops.add_stops(request, lambda begins_at: placement(32))
            prefill_stops.end(request, 0, is_loaded=False)
            assert not hasattr(request, "shared_prefix_boundary")
    assert len([record for record in caplog.records if record.name == logger.name]) == 1


multiples = st.integers(1, 30).map(lambda number: number * BLOCK)


@given(
    st.lists(st.sets(multiples, max_size=4), max_size=3),
    st.just(0) | multiples,
    st.integers(0, 10).map(lambda number: number * BLOCK),
    st.lists(st.integers(1, CHUNK), max_size=12),
)
def test_the_next_stop_is_the_first_after_the_start_of_the_step(
    wishes: list[set[int]], own: int, start: int, chunks: list[int]
) -> None:
    request = new_request()
    prefill_stops = PrefillStops(CHUNK)
    stops = {stop for stops in wishes for stop in stops if stop <= request.num_prompt_tokens} | {own} - {0}
    written = first_stop(prefill_stops, request, *(placement(*stops) for stops in wishes), own=own, start=start)
    request.num_computed_tokens = start
    for most_tokens in chunks:
        ahead = [stop for stop in stops if stop > request.num_computed_tokens]
        if ahead:
            assert written == min(ahead)
        else:
            assert written == own or written <= request.num_computed_tokens
        num_tokens = min(most_tokens, request.num_tokens - request.num_computed_tokens)
        if not num_tokens:
            break
        written = run(prefill_stops, request, num_tokens)
    assert written == compat.get_prefill_stop(request)
