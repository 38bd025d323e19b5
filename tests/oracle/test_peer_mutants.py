"""Controls of the peer scenarios: a connector with one fault is found by them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given

from hybridkv.connectors.vllm import register
from hybridkv.connectors.vllm.nixl import consumer
from hybridkv.connectors.vllm.nixl.agent import rank_read
from hybridkv.connectors.vllm.nixl.agent.rank_read import RankRead
from hybridkv.connectors.vllm.nixl.memory.rank_memory import NixlRankMemory
from hybridkv.peers import cells, pairing
from hybridkv.peers.leases import NO_NONCE
from hybridkv.planner import GroupKind, GroupSpec, TokenSpan
from kits.peers.faults import FaultPlan, Rule, WrongBytes
from oracle.engine import LeakError
from oracle.mixes import GPT_OSS
from oracle.peer_mixes import CUT_WINDOWS, MLA, Sides, alike
from oracle.peer_runs import play
from oracle.peer_scenarios import LEASE_S, PeerScenario, Proxy, Trouble, Turn, What, peer_scenarios
from oracle.peer_simulation import BugError
from oracle.profile import profile
from oracle.runner import CorruptionError, OracleError

MOST = 80
"""Scenarios in which a fault must show. They end with the first that shows it."""


class FoundError(Exception):
    """A scenario showed the fault."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def lease_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NixlRankMemory, "has_nonce", lambda self, place, nonce: True)


def lease_stays_in_its_slot(patch: pytest.MonkeyPatch) -> None:
    write = NixlRankMemory.write_slot

    def write_slot(self: NixlRankMemory, slot: int, nonce: int) -> None:
        if nonce != NO_NONCE:
            write(self, slot, nonce)

    patch.setattr(NixlRankMemory, "write_slot", write_slot)


def digests_always_agree(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rank_read, "mismatches", lambda *digests: [])


def window_is_one_token_short(patch: pytest.MonkeyPatch) -> None:
    def off_by_one(spec: GroupSpec, *rest: int) -> TokenSpan:
        if spec.kind is GroupKind.WINDOW:
            spec = msgspec.structs.replace(spec, window_tokens=(spec.window_tokens or 0) - 1)
        return cells.moved_span(spec, *rest)

    patch.setattr(pairing, "moved_span", off_by_one)


def prompts_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumer, "prefix_digest", _Anything)


class _Anything(str):
    """Equal to each digest."""

    def __new__(cls, *_: Any) -> _Anything:
        return super().__new__(cls)

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def reads_that_still_write_count_as_ended(patch: pytest.MonkeyPatch) -> None:
    def try_release_transfer(self: RankRead) -> bool:
        if self._transfer is not None:
            self._tools.transport.release(self._transfer)
            self._transfer = None
        return True

    patch.setattr(RankRead, "_try_release_transfer", try_release_transfer)


# Condition of a scenario for a fault to matter. Few scenarios have it by chance, and the test would take minutes.


def leases_run_out(scenario: PeerScenario) -> PeerScenario:
    jumps = tuple(Trouble(at, What.JUMP, seconds=2 * LEASE_S) for at in range(3, 80, 4))
    return replace(scenario, troubles=jumps, plan=FaultPlan())


def bytes_change(scenario: PeerScenario) -> PeerScenario:
    return replace(scenario, troubles=(), plan=FaultPlan((Rule(WrongBytes(scenario.seed), nth=1),)))


def answers_are_mixed_up(scenario: PeerScenario) -> PeerScenario:
    return _with_turns(scenario, lambda turn, at: replace(turn, proxy=Proxy.MIXED_UP, abort_target_after=None))


def consumers_give_up(scenario: PeerScenario) -> PeerScenario:
    return _with_turns(scenario, lambda turn, at: replace(turn, abort_target_after=2 + at % 7 if at % 2 else None))


def as_it_is(scenario: PeerScenario) -> PeerScenario:
    return scenario


def _with_turns(scenario: PeerScenario, change: Callable[[Turn, int], Turn]) -> PeerScenario:
    count = itertools.count(1)
    talks = (
        replace(talk, turns=tuple(change(turn, next(count)) for turn in talk.turns), begins=min(talk.begins, 3))
        for talk in scenario.talks
    )
    return replace(scenario, talks=tuple(talks), troubles=(), plan=FaultPlan())


class Mutant(NamedTuple):
    spoil: Callable[[pytest.MonkeyPatch], None]
    tune: Callable[[PeerScenario], PeerScenario]
    sides: Sides
    verify: bool
    shows_as: type[OracleError] | tuple[type[OracleError], ...] = CorruptionError


MUTANTS = (
    Mutant(lease_is_not_compared, leases_run_out, alike(GPT_OSS), verify=False),
    Mutant(lease_stays_in_its_slot, leases_run_out, alike(GPT_OSS), verify=False),
    Mutant(digests_always_agree, bytes_change, alike(GPT_OSS), verify=True),
    Mutant(window_is_one_token_short, as_it_is, alike(CUT_WINDOWS), verify=True),
    Mutant(
        prompts_are_not_compared,
        answers_are_mixed_up,
        alike(MLA),
        verify=True,
        # Bytes of another prompt are taken, or first a lease is read that has another reader.
        shows_as=(CorruptionError, BugError),
    ),
    Mutant(
        reads_that_still_write_count_as_ended,
        consumers_give_up,
        alike(GPT_OSS),
        verify=True,
        # Blocks of another request are written, or first the unreleased transfer is noticed.
        shows_as=(CorruptionError, LeakError),
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.spoil.__name__)
def test_every_fault_of_a_connector_is_found(mutant: Mutant) -> None:
    found: list[OracleError] = []

    @profile(MOST, whole=True)
    @given(peer_scenarios(mutant.sides, mutant.verify))
    def check(scenario: PeerScenario) -> None:
        if not found:
            try:
                play(mutant.sides, mutant.tune(scenario), mutant.spoil)
            except OracleError as error:
                found.append(error)
        if found:
            raise FoundError

    with pytest.raises(FoundError):
        check()
    assert isinstance(found[0], mutant.shows_as), found[0]


def test_an_exception_in_the_connectors_thread_is_found() -> None:
    """On a real thread it would be only a line in the log."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(NixlRankMemory, "take_scratch", lambda self: 1 // 0)

    @profile(MOST, whole=True)
    @given(peer_scenarios(alike(GPT_OSS)))
    def check(scenario: PeerScenario) -> None:
        play(alike(GPT_OSS), scenario, spoil)

    with pytest.raises(OracleError, match="ZeroDivisionError"):
        check()
