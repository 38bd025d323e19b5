"""The active troubles around an engine, and those from which it has not recovered yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random

from soak.plans import LifePlan, WorldPlan
from soak.tally import Tally
from soak.troubles import DAMAGES, TROUBLES, Around, Blame, Trouble

MOST_AT_ONCE = 2
READ_ONLY_AT_FIRST = Trouble("read-only from the beginning", Blame.STORES, lambda _: None)


class Weather:
    """The troubles of one life.

    Attributes:
        going_on: the active troubles, each with the function that ends it.
        recent: all troubles since the last recovery, with their possible effects.
    """

    def __init__(self, world: WorldPlan, plan: LifePlan, around: Around, tally: Tally) -> None:
        self._around = around
        self._tally = tally
        self._choices = (TROUBLES, DAMAGES if world.has_damage else TROUBLES)
        self.going_on: dict[Trouble, Callable[[], None]] = {}
        self.recent: dict[str, Blame] = {}
        if plan.is_read_only_at_first and around.small_disk is not None:
            self._note(READ_ONLY_AT_FIRST, around.small_disk.make_writable)

    @property
    def blames(self) -> set[Blame]:
        return set(self.recent.values())

    @property
    def is_frozen(self) -> bool:
        return any(trouble.name.startswith("frozen") for trouble in self.going_on)

    def __str__(self) -> str:
        return " and ".join(self.recent) or "no trouble"

    def change(self, random: Random) -> bool:
        """Begin or end a trouble. Returns True if no trouble is active any more."""
        if self.going_on and random.random() < 0.6:
            trouble = random.choice(list(self.going_on))
            self.going_on.pop(trouble)()
            if random.random() < 0.5:
                self.end_all()
                return True
        elif len(self.going_on) < MOST_AT_ONCE:
            common, rare = self._choices
            self._begin(random.choice(common if random.random() < 0.85 else rare))
        return False

    def _begin(self, trouble: Trouble) -> None:
        if trouble in self.going_on:
            return
        with contextlib.suppress(OSError):  # a trouble may prevent another one: a read-only disk cannot be damaged
            over = trouble.begin(self._around)
            if over is not None:
                self._note(trouble, over)

    def _note(self, trouble: Trouble, over: Callable[[], None]) -> None:
        self.going_on[trouble] = over
        self.recent[trouble.name] = trouble.blame
        self._tally.add(f"trouble: {trouble.name}")

    def end_all(self) -> None:
        while self.going_on:
            _, over = self.going_on.popitem()
            over()

    def clear_up(self) -> None:
        """The engine has recovered from all troubles."""
        self.recent.clear()
