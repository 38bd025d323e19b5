"""Strangers at the port of control connections: none is let in, and honest questions are answered meanwhile.

`ATTACKS_S` says for how many seconds each goes on, and has the time printed that honest questions take meanwhile.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import attacks
import pytest
from attacks import ATTACKS, Address, Besieged
from control_pair import Rogue

from kits.peers.suite import until

SECONDS = float(os.environ.get("ATTACKS_S", "0"))
LEAST_TRIES, LEAST_ASKED = 3, 50


@pytest.fixture
def besieged() -> Iterator[Besieged]:
    made = Besieged()
    yield made
    made.close()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda each: each.__name__)
def test_a_stranger_is_not_let_in_and_honest_questions_are_answered(
    besieged: Besieged, attack: Callable[[Address, random.Random], None]
) -> None:
    if attack is attacks.replay:
        attacks._recorded(besieged.address)
    let_in, asked = besieged.num_let_in(), list[float]()
    until_s = time.monotonic() + SECONDS
    with besieged.under(attack) as num_tries:
        while len(asked) < LEAST_ASKED or num_tries() < LEAST_TRIES or time.monotonic() < until_s:
            asked.append(besieged.ask())
    until(lambda: besieged.num_turned_out() >= LEAST_TRIES)
    assert besieged.num_let_in() == let_in
    if SECONDS:
        p99_ms = sorted(asked)[len(asked) * 99 // 100] * 1000
        print(f"{attack.__name__}: {num_tries()} tries, {len(asked)} questions, p99 {p99_ms:.1f} ms")


def test_who_knows_the_secret_is_let_in(besieged: Besieged) -> None:
    """The control: the same first word, and the right keys."""
    rogue, before = Rogue(besieged.address, attacks.SECRET), besieged.num_let_in()
    try:
        rogue.say(attacks.HELLO)
        until(lambda: besieged.num_let_in() == before + 1)
    finally:
        rogue.close()


def test_a_newcomer_is_let_in_while_others_flood_the_port(besieged: Besieged) -> None:
    with besieged.under(attacks.flood) as num_tries:
        until(lambda: num_tries() >= LEAST_TRIES)
        for number in range(5):
            before = besieged.num_let_in()
            rogue = Rogue(besieged.address, attacks.SECRET)
            rogue.greet(name=f"newcomer {number}")
            until(lambda before=before: besieged.num_let_in() == before + 1)  # type: ignore[misc]
            rogue.close()
