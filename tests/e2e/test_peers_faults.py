"""After any fault during the transfer of a prompt, the remaining engine answers as if it had run alone.

The producer is killed, stopped, disconnected or receives false messages, each at a defined point. A relay on the
control connections, or the consumer's transport, stops there and reports it; no test waits for time to pass. Afterwards
the remaining engine holds no blocks, and its counters show why a prompt was not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from equality import require_same_written
from harness import make_prompt, scratch_directory
from peers_faults import FAILURES, LEASE_S, LEASES, LOAD_S, MAX_LEASES, NUM_TOKENS, PROMPTS, Faults, ReadGate
from relay import Gate
from strangers import Stranger, garbage, send_raw

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
    """Requires empty caches before the test and no allocations after it."""
    world.require_rest()
    yield world
    try:
        world.require_rest()
    finally:
        # A failed test must not delay the next one.
        world.expire()


def hold_at(faults: Faults, point: str) -> Gate | ReadGate:
    """The gate that stops a read: before connecting, during the read, before the check of the lease, or before the
    digests.
    """
    if point in ("read", "lease"):
        return ReadGate(faults.consumer, after=("read", "lease").index(point))
    gate = faults.producer.relay.requests
    gate.hold()
    return gate


def start_held_read(faults: Faults, params: dict[str, Any], gate: Gate | ReadGate) -> str:
    """Start a request for the prompt at the consumer, and wait until it is held. The name of the request."""
    name = faults.consumer.name()
    faults.consumer.add(name, faults.prompt, params=params)
    gate.wait_until_holding()
    return name


def set_up_connection(faults: Faults, point: str) -> None:
    """Connect the two, so that the next step is a read; or disconnect them for 'connect'."""
    if point == "connect":
        faults.producer.relay.cut()
        faults.consumer.until("peers", lambda number: number == 0)
    else:
        other = make_prompt(NUM_TOKENS, seed=2)
        faults.consumer.compute(other, faults.producer.prefill(other), max_tokens=1)


def test_a_prompt_is_transferred_through_the_relay(faults: Faults) -> None:
    with faults.counting():
        before = faults.consumer.counts(PROMPTS)
        got = faults.consumer.compute(faults.prompt, faults.producer.prefill(faults.prompt))
        faults.require_cold(got, first_computed=LAST)
        assert faults.consumer.counts(PROMPTS) - before == {"loaded": 1}


# Killed producers.


@pytest.mark.parametrize("point", ["read", "lease", "digests"])
def test_a_killed_producer_costs_only_the_unread_prompts(faults: Faults, point: str) -> None:
    first, later = make_prompt(NUM_TOKENS, seed=2), make_prompt(NUM_TOKENS, seed=3)
    cold = faults.consumer.compute(later)
    faults.consumer.ask("forget")
    params = {number: faults.producer.prefill(prompt) for number, prompt in enumerate((first, faults.prompt, later))}
    with faults.counting():
        loaded = faults.consumer.compute(first, params[0])
    with faults.counting(gone=2):
        name = start_held_read(faults, params[1], hold_at(faults, point))
        # The request stays held: the network reports nothing.
        faults.kill_producer()
        faults.require_cold(faults.consumer.result(name), first_computed=0)
        # A producer that was killed before the request.
        got = faults.consumer.compute(later, params[2])
        assert got["steps"][0][0] == 0
        require_same_written([cold], [got])
        # Blocks that were read earlier stay and are correct.
        again = faults.consumer.compute(first)
        assert again["steps"][0][0] > 0
        assert (again["tokens"], again["logprobs"]) == (loaded["tokens"], loaded["logprobs"])


# Silent producers.


@pytest.mark.parametrize("point", ["connect", "read", "lease", "digests"])
def test_a_stopped_producer_costs_one_load_timeout(faults: Faults, point: str) -> None:
    set_up_connection(faults, point)
    params = faults.producer.prefill(faults.prompt)
    with faults.counting(timeout=1):
        gate = hold_at(faults, point)
        name = start_held_read(faults, params, gate)
        with faults.producer.stopped():
            if point in ("connect", "digests"):  # reads do not need the producer's CPU, and may end earlier
                gate.release()
            faults.consumer.later(LOAD_S)
            # The producer has not continued yet.
            faults.require_cold(faults.consumer.result(name), first_computed=0)
    gate.release()
    # Now it processes the messages, unless its connections timed out.
    faults.producer.later(LEASE_S)


def test_a_read_held_by_the_network_costs_one_load_timeout(faults: Faults) -> None:
    params = faults.producer.prefill(faults.prompt)
    with faults.counting(timeout=1):
        name = start_held_read(faults, params, hold_at(faults, "read"))
        faults.consumer.later(LOAD_S)
        faults.require_cold(faults.consumer.result(name), first_computed=0)


# Expired leases whose blocks were overwritten by other requests.

CHECKS = {"all": [], "the lease alone": ["digests"], "digests alone": ["lease"], "nothing": ["digests", "lease"]}


@pytest.fixture(params=CHECKS)
def checked(request: pytest.FixtureRequest, faults: Faults) -> Iterator[str]:
    """The checks that the consumer makes."""
    faults.consumer.ask("checks", skipped=CHECKS[request.param])
    yield request.param
    faults.consumer.ask("checks", skipped=[])


def require_rejected(faults: Faults, got: dict[str, Any], checked: str) -> None:
    """Require a computed prompt. Without any check the wrong blocks are accepted, which is the control."""
    if checked == "nothing":
        assert got["steps"][0][0] == LAST and not faults.is_cold(got)
    else:
        faults.require_cold(got, first_computed=0)


def test_blocks_are_not_accepted_after_their_lease(faults: Faults, checked: str) -> None:
    params = faults.producer.prefill(faults.prompt)
    faults.producer.later(LEASE_S)
    assert faults.producer.ask("idle")
    faults.producer.overwrite(params)
    with faults.counting(**({} if checked == "nothing" else {"lease": 1})):
        require_rejected(faults, faults.consumer.compute(faults.prompt, params), checked)


def test_blocks_are_not_accepted_if_their_lease_ends_during_the_read(faults: Faults, checked: str) -> None:
    params = faults.producer.prefill(faults.prompt)
    reason = {"all": "lease", "the lease alone": "lease", "digests alone": "digest"}.get(checked)
    with faults.counting(**({} if reason is None else {reason: 1})):
        gate = hold_at(faults, "read")
        name = start_held_read(faults, params, gate)
        # The digests arrived while the lease was valid, so each check is tested separately.
        faults.consumer.until("held", lambda held: held["digests asked for"] == 0)
        faults.producer.later(LEASE_S)
        assert faults.producer.ask("idle")
        faults.producer.overwrite(params)
        gate.release()
        require_rejected(faults, faults.consumer.result(name), checked)


def test_a_lease_is_renewed_while_its_blocks_are_read(faults: Faults) -> None:
    params = faults.producer.prefill(faults.prompt)
    with faults.counting():
        gate = hold_at(faults, "read")
        name = start_held_read(faults, params, gate)
        for _ in range(3):
            faults.producer.later(LEASE_S / 2)
            faults.consumer.later(LEASE_S / 2)
            faults.producer.until("seconds", lambda seconds: seconds > LEASE_S / 2)
        gate.release()
        faults.require_cold(faults.consumer.result(name), first_computed=LAST)


def test_unfetched_blocks_are_freed_when_their_lease_ends(faults: Faults) -> None:
    before = faults.producer.counts(LEASES)
    for seed in range(MAX_LEASES):
        faults.producer.prefill(make_prompt(NUM_TOKENS, seed=seed))
    # All leases are in use: no blocks are held for this prompt, and the consumer gets no parameters.
    assert faults.producer.prefill(make_prompt(NUM_TOKENS, seed=9)) is None
    faults.producer.later(LEASE_S)
    faults.producer.require_rest()
    assert faults.producer.counts(LEASES) - before == {"expired": MAX_LEASES, "no_room": 1}


# Aborts.


@pytest.mark.parametrize("point", ["connect", "read", "lease", "digests"])
def test_an_aborted_consumer_frees_its_blocks_and_the_producers(faults: Faults, point: str) -> None:
    set_up_connection(faults, point)
    before = faults.producer.counts(LEASES)
    with faults.counting(cancelled=1):
        gate = hold_at(faults, point)
        name = start_held_read(faults, faults.producer.prefill(faults.prompt), gate)
        faults.consumer.ask("abort", request=name)
        # The held read stays held.
        assert faults.consumer.ask("idle") == faults.consumer.free
        gate.release()
    faults.producer.require_rest()
    assert faults.producer.counts(LEASES) - before == {"done": 1}


def test_an_aborted_producer_transfers_nothing(faults: Faults) -> None:
    before = faults.producer.counts(LEASES)
    name = faults.producer.name()
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    faults.producer.add(name, faults.prompt, params=wanted, abort_when="RUNNING")
    assert faults.producer.result(name) == {"aborted": "RUNNING"}
    faults.producer.require_rest()
    assert faults.producer.counts(LEASES) - before == {"dropped": 1}


# Invalid messages and bytes.


def lease_of(params: dict[str, Any]) -> Lease:
    slot, nonce = params["hybridkv"]["lease"]
    return Lease(slot, int(nonce, 16))


def test_messages_about_invalid_leases_change_nothing(faults: Faults) -> None:
    params = faults.producer.prefill(faults.prompt)
    lease, port = lease_of(params), faults.producer.port
    stranger = Stranger(port)
    for each in (Lease(lease.slot, lease.nonce ^ 1), Lease(lease.slot + 1, lease.nonce), Lease(1 << 40, 1)):
        stranger.say(LeaseDone(each, True, 0, 1))
        assert stranger.ask(Renew(each)) == Renewed(each, 0.0)
    assert isinstance(stranger.ask(Describe(b"rubbish", b"")), Refused)
    # Digests are sent only to peers that have described themselves, and unsolicited ones are rejected.
    for unexpected in (RequestDigests(1, lease, 1, pack_columns([[0], [0], [1]])), Digests(1, b""), Notice(b"hello")):
        stranger.say(unexpected)
        stranger.wait_until_disconnected()
        stranger = Stranger(port)
    with faults.counting():
        faults.require_cold(faults.consumer.compute(faults.prompt, params), first_computed=LAST)
    # The lease has ended, and cannot end twice.
    stranger.say(LeaseDone(lease, True, 0, 1))
    assert stranger.ask(Renew(lease)) == Renewed(lease, 0.0)
    stranger.close()


def test_garbage_on_the_port_changes_nothing(faults: Faults) -> None:
    params = faults.producer.prefill(faults.prompt)
    for data in garbage():
        send_raw(faults.producer.port, data)
    with faults.counting():
        faults.require_cold(faults.consumer.compute(faults.prompt, params), first_computed=LAST)


def test_a_fetched_prompt_is_not_fetched_again(faults: Faults) -> None:
    """For example if a proxy gives one answer to two engines, or retries."""
    params = faults.producer.prefill(faults.prompt)
    with faults.counting(lease=1):
        faults.require_cold(faults.consumer.compute(faults.prompt, params), first_computed=LAST)
        faults.consumer.ask("forget")
        faults.require_cold(faults.consumer.compute(faults.prompt, params), first_computed=0)


@pytest.mark.parametrize(("what", "reason"), [("bytes", "digest"), ("words", "gone")])
def test_data_changed_in_transit_is_not_accepted(faults: Faults, what: str, reason: str) -> None:
    set_up_connection(faults, "read")
    params = faults.producer.prefill(faults.prompt)
    with faults.counting(**{reason: 1}):
        name = start_held_read(faults, params, hold_at(faults, "read"))
        if what == "bytes":
            faults.consumer.let_go(is_spoilt=True)
        else:
            # The next message, whatever it is. The read is still held.
            faults.producer.relay.answers.release(is_spoilt=True)
        faults.require_cold(faults.consumer.result(name), first_computed=0)
    faults.expire()


# Failures at the consumer.


def test_with_policy_fail_only_the_failed_request_ends_with_an_error(faults: Faults) -> None:
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


def test_a_consumer_killed_during_a_read_costs_its_producer_one_lease(faults: Faults) -> None:
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
