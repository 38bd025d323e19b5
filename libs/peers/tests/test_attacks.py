"""Strangers at the port of control connections: none is admitted, and honest requests are answered meanwhile.

`ATTACKS_S` sets the seconds for each attack and prints the time that honest requests take meanwhile.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import attacks
import pytest
from attacks import ATTACKS, Address, AttackedListener
from control_pair import Rogue

from hybridkv.peers.wire import WireLimits
from kits.peers.suite import until

SECONDS = float(os.environ.get("ATTACKS_S", "0"))
LEAST_TRIES, LEAST_ASKED = 3, 50


@pytest.fixture
def attacked() -> Iterator[AttackedListener]:
    made = AttackedListener()
    yield made
    made.close()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda each: each.__name__)
def test_a_stranger_is_not_admitted_and_honest_requests_are_answered(
    attacked: AttackedListener, attack: Callable[[Address, random.Random], None]
) -> None:
    if attack is attacks.replay:
        before = attacked.num_admitted()
        attacks._recorded(attacked.address)
        until(lambda: attacked.num_admitted() == before + 1)
    let_in, asked = attacked.num_admitted(), list[float]()
    until_s = time.monotonic() + SECONDS
    with attacked.under(attack) as num_tries:
        while len(asked) < LEAST_ASKED or num_tries() < LEAST_TRIES or time.monotonic() < until_s:
            asked.append(attacked.ask())
    until(lambda: attacked.num_rejected() >= LEAST_TRIES)
    assert attacked.num_admitted() == let_in
    if SECONDS:
        p99_ms = sorted(asked)[len(asked) * 99 // 100] * 1000
        print(f"{attack.__name__}: {num_tries()} tries, {len(asked)} requests, p99 {p99_ms:.1f} ms")


def test_a_peer_with_the_secret_is_admitted(attacked: AttackedListener) -> None:
    """The control: the same first message, and the right keys."""
    rogue, before = Rogue(attacked.address, attacks.SECRET), attacked.num_admitted()
    try:
        rogue.say(attacks.HELLO)
        until(lambda: attacked.num_admitted() == before + 1)
    finally:
        rogue.close()


def test_a_new_peer_is_admitted_during_a_flood(attacked: AttackedListener) -> None:
    """A flood may push out a connection before it is admitted, or fill the system's queue of new connections. Then the
    newcomer connects again, as a peer does."""
    with attacked.under(attacks.flood) as num_tries:
        until(lambda: num_tries() >= LEAST_TRIES)
        for number in range(5):
            newcomer = Newcomer(attacked, f"newcomer {number}")
            until(newcomer.is_admitted)
            newcomer.rogue.close()


class Newcomer:
    """Peer that connects until the listener admits it."""

    def __init__(self, attacked: AttackedListener, name: str) -> None:
        self.attacked, self.name, self.before = attacked, name, attacked.num_admitted()
        self.rogue = self.connected()

    def connected(self) -> Rogue:
        self.until_s = time.monotonic() + WireLimits().handshake_timeout_s
        rogue = Rogue(self.attacked.address, attacks.SECRET)
        rogue.greet(name=self.name)
        return rogue

    def is_admitted(self) -> bool:
        if self.attacked.num_admitted() > self.before:
            return True
        if self.rogue.is_thrown_out() or time.monotonic() > self.until_s:
            self.rogue.close()
            self.rogue = self.connected()
        return False
