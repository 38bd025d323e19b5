"""Whatever happens to an engine that hands over a prompt, the one that goes on with it answers as if alone.

The producer is killed, stopped, cut off and lied about, each at a point that the test names. A relay between the
control connections of the two, or the consumer's transport, stops there and says so; no test waits for time to pass.
After each the engine that lives holds no block, and its counters say why a prompt was not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from equality import require_same_written
from harness import make_prompt, scratch_directory
from peers_faults import FAILURES, LEASE_S, LEASES, LOAD_S, MAX_LEASES, NUM_TOKENS, PROMPTS, Faults, ReadGate
from relay import Gate
from strangers import Stranger, rubbish, shout

from hybridkv.peers.leases import Lease
from hybridkv.peers.wire import (
    Describe,
    Digests,
    LeaseDone,
    Notice,
    Refused,
    Renew,
    Renewed,
    RequestDigests,
    pack_columns,
)

LAST = NUM_TOKENS - 1


@pytest.fixture(scope="module")
def world(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    faults = Faults(kind, scratch_directory(tmp_path_factory.mktemp("faults")))
    try:
        yield faults
    finally:
        faults.end()


@pytest.fixture
def faults(world: Faults) -> Iterator[Faults]:
    """Nothing is cached, and in the end nothing is held."""
    world.require_rest()
    yield world
    try:
        world.require_rest()
    finally:
        # What a test has left that failed costs no other its time.
        world.expire()


def held_up(faults: Faults, point: str) -> Gate | ReadGate:
    """The gate at which a read stops: before they meet, in mid-read, before the lease is read, or digests asked for."""
    if point in ("read", "lease"):
        return ReadGate(faults.consumer, after=("read", "lease").index(point))
    gate = faults.producer.relay.requests
    gate.hold()
    return gate


def begun(faults: Faults, params: dict[str, Any], gate: Gate | ReadGate) -> str:
    """The consumer goes on with the prompt, and is held up. The name of its request."""
    name = faults.consumer.name()
    faults.consumer.add(name, faults.prompt, params=params)
    gate.wait_until_holding()
    return name


def introduce(faults: Faults, point: str) -> None:
    """The two have met, so that what is held up next is a read; or they have not."""
    if point == "connect":
        faults.producer.relay.cut()
        faults.consumer.until("peers", lambda number: number == 0)
    else:
        other = make_prompt(NUM_TOKENS, seed=2)
        faults.consumer.compute(other, faults.producer.prefill(other), max_tokens=1)


def test_through_the_relay_a_prompt_is_handed_over(faults: Faults) -> None:
    with faults.counting():
        before = faults.consumer.counts(PROMPTS)
        got = faults.consumer.compute(faults.prompt, faults.producer.prefill(faults.prompt))
        faults.require_cold(got, first_computed=LAST)
        assert faults.consumer.counts(PROMPTS) - before == {"loaded": 1}


# The producer is gone.


@pytest.mark.parametrize("point", ["read", "lease", "digests"])
def test_a_producer_that_is_killed_costs_what_was_not_read_by_then(faults: Faults, point: str) -> None:
    first, later = make_prompt(NUM_TOKENS, seed=2), make_prompt(NUM_TOKENS, seed=3)
    cold = faults.consumer.compute(later)
    faults.consumer.ask("forget")
    params = {number: faults.producer.prefill(prompt) for number, prompt in enumerate((first, faults.prompt, later))}
    with faults.counting():
        loaded = faults.consumer.compute(first, params[0])
    with faults.counting(gone=2):
        name = begun(faults, params[1], held_up(faults, point))
        # What is held up stays so: the network says nothing.
        faults.kill_producer()
        faults.require_cold(faults.consumer.result(name), first_computed=0)
        # One that was gone before it was asked.
        got = faults.consumer.compute(later, params[2])
        assert got["steps"][0][0] == 0
        require_same_written([cold], [got])
        # What was read before stays, and is right.
        again = faults.consumer.compute(first)
        assert again["steps"][0][0] > 0
        assert (again["tokens"], again["logprobs"]) == (loaded["tokens"], loaded["logprobs"])


# The producer says nothing.


@pytest.mark.parametrize("point", ["connect", "read", "lease", "digests"])
def test_a_producer_that_stops_costs_the_time_that_is_given(faults: Faults, point: str) -> None:
    introduce(faults, point)
    params = faults.producer.prefill(faults.prompt)
    with faults.counting(timeout=1):
        gate = held_up(faults, point)
        name = begun(faults, params, gate)
        with faults.producer.stopped():
            if point in ("connect", "digests"):  # reads need no processor of the producer, and may end before
                gate.release()
            faults.consumer.later(LOAD_S)
            # It has not gone on yet.
            faults.require_cold(faults.consumer.result(name), first_computed=0)
    gate.release()
    # What it was told meanwhile it hears now, unless it was away for so long that its connections ended.
    faults.producer.later(LEASE_S)


def test_what_is_held_up_on_the_way_costs_the_time_that_is_given(faults: Faults) -> None:
    params = faults.producer.prefill(faults.prompt)
    with faults.counting(timeout=1):
        name = begun(faults, params, held_up(faults, "read"))
        faults.consumer.later(LOAD_S)
        faults.require_cold(faults.consumer.result(name), first_computed=0)


# The lease has run out, and other requests have the blocks.

CHECKS = {"all": [], "the lease alone": ["digests"], "digests alone": ["lease"], "nothing": ["digests", "lease"]}


@pytest.fixture(params=CHECKS)
def checked(request: pytest.FixtureRequest, faults: Faults) -> Iterator[str]:
    """What the consumer compares."""
    faults.consumer.ask("checks", skipped=CHECKS[request.param])
    yield request.param
    faults.consumer.ask("checks", skipped=[])


def require_not_taken(faults: Faults, got: dict[str, Any], checked: str) -> None:
    """Where nothing is compared the blocks are taken, and are wrong: the control."""
    if checked == "nothing":
        assert got["steps"][0][0] == LAST and not faults.is_cold(got)
    else:
        faults.require_cold(got, first_computed=0)


def test_blocks_are_not_taken_after_their_lease(faults: Faults, checked: str) -> None:
    params = faults.producer.prefill(faults.prompt)
    faults.producer.later(LEASE_S)
    assert faults.producer.ask("idle")
    faults.producer.overwrite(params)
    with faults.counting(**({} if checked == "nothing" else {"lease": 1})):
        require_not_taken(faults, faults.consumer.compute(faults.prompt, params), checked)


def test_blocks_are_not_taken_whose_lease_ends_while_they_are_read(faults: Faults, checked: str) -> None:
    params = faults.producer.prefill(faults.prompt)
    reason = {"all": "lease", "the lease alone": "lease", "digests alone": "digest"}.get(checked)
    with faults.counting(**({} if reason is None else {reason: 1})):
        gate = held_up(faults, "read")
        name = begun(faults, params, gate)
        # Digests that came while the lease held: so each check stands for itself.
        faults.consumer.until("held", lambda held: held["digests asked for"] == 0)
        faults.producer.later(LEASE_S)
        assert faults.producer.ask("idle")
        faults.producer.overwrite(params)
        gate.release()
        require_not_taken(faults, faults.consumer.result(name), checked)


def test_a_lease_is_renewed_as_long_as_its_blocks_are_read(faults: Faults) -> None:
    params = faults.producer.prefill(faults.prompt)
    with faults.counting():
        gate = held_up(faults, "read")
        name = begun(faults, params, gate)
        for _ in range(3):
            faults.producer.later(LEASE_S / 2)
            faults.consumer.later(LEASE_S / 2)
            faults.producer.until("seconds", lambda seconds: seconds > LEASE_S / 2)
        gate.release()
        faults.require_cold(faults.consumer.result(name), first_computed=LAST)


def test_blocks_that_nobody_fetches_are_free_when_the_lease_ends(faults: Faults) -> None:
    before = faults.producer.counts(LEASES)
    for seed in range(MAX_LEASES):
        faults.producer.prefill(make_prompt(NUM_TOKENS, seed=seed))
    # There are no more: nothing is held of this one, and its consumer is told nothing.
    assert faults.producer.prefill(make_prompt(NUM_TOKENS, seed=9)) is None
    faults.producer.later(LEASE_S)
    faults.producer.require_rest()
    assert faults.producer.counts(LEASES) - before == {"expired": MAX_LEASES, "no_room": 1}


# Aborts.


@pytest.mark.parametrize("point", ["connect", "read", "lease", "digests"])
def test_a_consumer_that_is_aborted_gives_back_its_blocks_and_the_producers(faults: Faults, point: str) -> None:
    introduce(faults, point)
    before = faults.producer.counts(LEASES)
    with faults.counting(cancelled=1):
        gate = held_up(faults, point)
        name = begun(faults, faults.producer.prefill(faults.prompt), gate)
        faults.consumer.ask("abort", request=name)
        # What is held stays held.
        assert faults.consumer.ask("idle") == faults.consumer.free
        gate.release()
    faults.producer.require_rest()
    assert faults.producer.counts(LEASES) - before == {"done": 1}


def test_a_producer_that_is_aborted_hands_nothing_over(faults: Faults) -> None:
    before = faults.producer.counts(LEASES)
    name = faults.producer.name()
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    faults.producer.add(name, faults.prompt, params=wanted, abort_when="RUNNING")
    assert faults.producer.result(name) == {"aborted": "RUNNING"}
    faults.producer.require_rest()
    assert faults.producer.counts(LEASES) - before == {"dropped": 1}


# Words and bytes that do not belong there.


def lease_of(params: dict[str, Any]) -> Lease:
    slot, nonce = params["hybridkv"]["lease"]
    return Lease(slot, int(nonce, 16))


def test_words_about_leases_that_are_none_change_nothing(faults: Faults) -> None:
    params = faults.producer.prefill(faults.prompt)
    lease, port = lease_of(params), faults.producer.port
    stranger = Stranger(port)
    for each in (Lease(lease.slot, lease.nonce ^ 1), Lease(lease.slot + 1, lease.nonce), Lease(1 << 40, 1)):
        stranger.say(LeaseDone(each, True, 0, 1))
        assert stranger.ask(Renew(each)) == Renewed(each, 0.0)
    assert isinstance(stranger.ask(Describe(b"rubbish", b"")), Refused)
    # Digests are given to those who have described themselves, and who is asked is not told any.
    for unexpected in (RequestDigests(1, lease, 1, pack_columns([[0], [0], [1]])), Digests(1, b""), Notice(b"hello")):
        stranger.say(unexpected)
        stranger.wait_until_thrown_out()
        stranger = Stranger(port)
    with faults.counting():
        faults.require_cold(faults.consumer.compute(faults.prompt, params), first_computed=LAST)
    # It has ended, and does not end again.
    stranger.say(LeaseDone(lease, True, 0, 1))
    assert stranger.ask(Renew(lease)) == Renewed(lease, 0.0)
    stranger.close()


def test_rubbish_changes_nothing(faults: Faults) -> None:
    params = faults.producer.prefill(faults.prompt)
    for data in rubbish():
        shout(faults.producer.port, data)
    with faults.counting():
        faults.require_cold(faults.consumer.compute(faults.prompt, params), first_computed=LAST)


def test_a_prompt_that_was_fetched_is_not_fetched_again(faults: Faults) -> None:
    """As when a proxy gives one answer to two engines, or tries again."""
    params = faults.producer.prefill(faults.prompt)
    with faults.counting(lease=1):
        faults.require_cold(faults.consumer.compute(faults.prompt, params), first_computed=LAST)
        faults.consumer.ask("forget")
        faults.require_cold(faults.consumer.compute(faults.prompt, params), first_computed=0)


@pytest.mark.parametrize(("what", "reason"), [("bytes", "digest"), ("words", "gone")])
def test_what_was_changed_on_the_way_is_not_taken(faults: Faults, what: str, reason: str) -> None:
    introduce(faults, "read")
    params = faults.producer.prefill(faults.prompt)
    with faults.counting(**{reason: 1}):
        name = begun(faults, params, held_up(faults, "read"))
        if what == "bytes":
            faults.consumer.let_go(is_spoilt=True)
        else:
            # The next word, whatever it is. The read is held up still.
            faults.producer.relay.answers.release(is_spoilt=True)
        faults.require_cold(faults.consumer.result(name), first_computed=0)
    faults.expire()


# The other side.


def test_where_loads_are_to_fail_the_request_ends_with_an_error_and_no_other(faults: Faults) -> None:
    strict, other = faults.strict, make_prompt(NUM_TOKENS, seed=2)
    cold = strict.compute(other)
    strict.ask("forget")
    lost = faults.producer.prefill(faults.prompt)
    faults.producer.later(LEASE_S)
    faults.producer.require_rest()
    kept = faults.producer.prefill(other)
    before = strict.counts(FAILURES)
    names = {name: strict.name() for name in ("lost", "kept")}
    strict.add(names["lost"], faults.prompt, params=lost)
    strict.add(names["kept"], other, params=kept)
    results = {word: strict.result(name) for word, name in names.items()}
    assert results["lost"]["finish_reason"] == "error" and results["lost"]["tokens"] == []
    assert results["kept"]["steps"][0][0] == LAST
    require_same_written([cold], [results["kept"]])
    assert strict.counts(FAILURES) - before == {"lease": 1}


def test_a_consumer_that_is_killed_while_it_reads_costs_its_producer_one_lease(faults: Faults) -> None:
    before = faults.producer.counts(LEASES)
    params = faults.producer.prefill(faults.prompt)
    gate = ReadGate(faults.strict, after=0)
    faults.strict.add(faults.strict.name(), faults.prompt, params=params)
    gate.wait_until_holding()
    faults.kill_strict()
    assert faults.producer.left_behind()
    faults.producer.later(LEASE_S)
    faults.producer.require_rest()
    assert faults.producer.counts(LEASES) - before == {"expired": 1}
    with faults.counting():
        got = faults.consumer.compute(faults.prompt, faults.producer.prefill(faults.prompt))
        faults.require_cold(got, first_computed=LAST)
