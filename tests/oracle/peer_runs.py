"""Runs a scenario of two engines, and checks it during the run and at its end.

In every step every byte that a forward pass would read is compared; at the end every request has its tokens, every
block is free on both sides, and no read, lease or hold remains. A read may fail only for a reason in the scenario:
otherwise the digests would hide a wrong pairing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from hybridkv.peers.wire import CloseReason
from kits.peers.faults import WrongBytes
from oracle.content import VOCABULARY_TOKENS
from oracle.engine import LeakError, StuckError
from oracle.pairs import PeerEngine, withheld_tokens
from oracle.peer_mixes import as_on_a_gpu
from oracle.peer_scenarios import Proxy, Trouble, What
from oracle.peer_simulation import BugError, Simulation, installed
from oracle.scenarios import tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from hybridkv.connectors.vllm.nixl.agent.agent import Agent
    from oracle.peer_mixes import Sides
    from oracle.peer_scenarios import PeerScenario, Talk, Turn

ROUND_S, IDLE_ROUND_S = 0.005, 0.5
PATIENT_ROUNDS = 24
"""Rounds without a computed token; from then on time passes quickly."""
MAX_ROUNDS = 3000
KEYS = ("hybridkv", "remote_block_ids", "remote_host", "remote_num_tokens", "remote_engine_id")
ALWAYS_WRONG = frozenset({"other", "pairing", "protocol", "refused"})


@dataclass(slots=True)
class _Speaker:
    """Progress of a talk."""

    number: int
    talk: Talk
    tokens: list[int]
    due: int
    turn: int = 0
    at_source: str | None = None
    at_target: str | None = None
    since: int = 0
    """The round in which its prompt went to the source, then to the target."""
    again: dict[str, Any] | None = None
    """Parameters that the proxy sends once more at the end."""
    is_over: bool = False


@dataclass(slots=True)
class PeerTally:
    """Counts of the scenarios of a test, to show that it tested what it claims."""

    scenarios: int = 0
    steps: int = 0
    restored_tokens: int = 0
    calm: int = 0
    with_restored: int = 0
    with_local_hits: int = 0
    with_preemptions: int = 0
    with_failures: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)

    def add(self, play: Play) -> None:
        engines = play.engines + play.gone
        restored = sum(engine.restored_tokens for engine in engines)
        self.scenarios += 1
        self.steps += sum(engine.num_steps for engine in engines)
        self.restored_tokens += restored
        self.calm += play.scenario.is_calm
        self.with_restored += restored > 0
        self.with_local_hits += any(engine.local_hit_tokens > 0 for engine in engines)
        self.with_preemptions += any(engine.preemptions > 0 for engine in engines)
        self.with_failures += bool(play.simulation.failures)
        for ours, theirs in ((self.failures, play.simulation.failures), (self.outcomes, play.simulation.outcomes)):
            for name, number in theirs.items():
                ours[name] = ours.get(name, 0) + number


class Play:
    """One scenario. Made and run inside of `installed(simulation)`."""

    def __init__(self, sides: Sides, scenario: PeerScenario, simulation: Simulation) -> None:
        self.sides = sides
        self.scenario = scenario
        self.simulation = simulation
        self.gone: list[PeerEngine] = []
        self.engines = [self._start(0), self._start(1)]
        prompts = tokens_of(scenario.prompts)
        self._speakers = [
            _Speaker(number, talk, list(prompts[talk.prompt]), talk.begins)
            for number, talk in enumerate(scenario.talks)
        ]
        self._answers: list[dict[str, Any]] = []
        self._said: list[list[int]] = []
        self._round = self._idle_rounds = 0

    def _start(self, side: int) -> PeerEngine:
        return PeerEngine(self.sides.mixes[side], self.scenario.settings[side])

    def run(self) -> None:
        """Runs it to its end, then every prompt once more, for content that may remain in a cache."""
        troubles = list(self.scenario.troubles)
        while troubles or not self._is_over():
            while troubles and troubles[0].round <= self._round:
                self._happen(troubles.pop(0))
            for speaker in self._speakers:
                self._go_on(speaker)
            self._step()
        self._check_end()
        for side, engine in enumerate(self.engines):
            for number, tokens in enumerate(self._said):
                engine.submit_with_params(f"again{side}-{number}", tokens, 2, None)
            engine.drain()
        self._check_end()

    def _step(self) -> None:
        simulation = self.simulation
        computed = False
        for engine in simulation.random.sample(self.engines, 2):
            computed |= engine.step()
            for _ in range(simulation.random.randrange(3)):
                simulation.turn()
        self._round += 1
        self._idle_rounds = 0 if computed else self._idle_rounds + 1
        if self._idle_rounds > 4:
            for _ in range(4):
                simulation.turn()
        simulation.now_s += IDLE_ROUND_S if self._idle_rounds > PATIENT_ROUNDS else ROUND_S
        if self._round > MAX_ROUNDS:
            left = "; ".join(engine._left() for engine in self.engines)
            raise StuckError(f"after {self._round} rounds: {left}; {simulation.kept()}")

    def _is_over(self) -> bool:
        return (
            all(speaker.is_over for speaker in self._speakers)
            and all(engine.is_idle for engine in self.engines)
            and self.simulation.is_quiet
        )

    # Events of engines and of the network.

    def _happen(self, trouble: Trouble) -> None:
        simulation = self.simulation
        match trouble.what:
            case What.CUT:
                simulation.network.cut()
            case What.STALL:
                simulation.network.stall()
            case What.RESUME:
                simulation.network.stalled = False
            case What.JUMP:
                simulation.now_s += trouble.seconds
            case What.PREEMPT:
                self.engines[trouble.side].preempt_all()
            case What.FORGET:
                self.engines[trouble.side].scheduler.reset_prefix_cache()
            case What.KILL | What.RESTART:
                self._replace(trouble.side, is_killed=trouble.what is What.KILL)

    def _replace(self, side: int, is_killed: bool) -> None:
        engine = self.engines[side]
        if is_killed:
            self.simulation.kill(agents_of(engine))
        else:
            engine.close()
        self.gone.append(engine)
        self.engines[side] = self._start(side)
        for speaker in (each for each in self._speakers if not each.is_over):
            turn = speaker.talk.turns[speaker.turn]
            waits_there = speaker.at_source is not None and turn.source == side and speaker.at_target is None
            if (waits_there and self._answer_of(speaker) is None) or (
                speaker.at_target is not None and turn.source != side
            ):
                speaker.is_over = True

    # Talks.

    def _go_on(self, speaker: _Speaker) -> None:
        if speaker.is_over or self._round < speaker.due:
            return
        turn = speaker.talk.turns[speaker.turn]
        source, target = self.engines[turn.source], self.engines[1 - turn.source]
        age = self._round - speaker.since
        if speaker.at_source is None:
            self._prefill(speaker, source)
        elif speaker.at_target is None:
            if turn.abort_source_after is not None and age >= turn.abort_source_after:
                source.abort(speaker.at_source)
                self._end(speaker)
            elif (answered := self._answer_of(speaker)) is not None:
                self._decode(speaker, turn, target, answered)
        elif turn.abort_target_after is not None and age >= turn.abort_target_after:
            target.abort(speaker.at_target)
            self._end(speaker)
        elif speaker.at_target not in target._open:
            self._answered(speaker, target)

    def _answer_of(self, speaker: _Speaker) -> tuple[dict[str, Any] | None] | None:
        """The source's answer, once it exists: from the engine that got the prompt, which may be gone by now."""
        for engine in (*self.engines, *self.gone):
            if speaker.at_source in engine.answered:
                return (engine.answered[str(speaker.at_source)],)
        return None

    def _prefill(self, speaker: _Speaker, source: PeerEngine) -> None:
        speaker.at_source = f"p{speaker.number}-{speaker.turn}"
        speaker.since = self._round
        withheld = withheld_tokens(source.mix)
        withheld = withheld if len(speaker.tokens) > withheld else 0
        source.submit_with_params(speaker.at_source, speaker.tokens, 1, {"do_remote_decode": True}, withheld)
        speaker.due = self._round

    def _decode(
        self, speaker: _Speaker, turn: Turn, target: PeerEngine, answered: tuple[dict[str, Any] | None]
    ) -> None:
        if turn.wait and speaker.due <= speaker.since:
            speaker.due = self._round + turn.wait
            return
        name = speaker.at_target = f"d{speaker.number}-{speaker.turn}"
        speaker.since = self._round
        params = self._carried(turn, answered[0])
        target.submit_with_params(name, speaker.tokens, turn.num_outputs, params)
        if turn.proxy is Proxy.TWICE:
            target.submit_with_params(f"{name}-twice", speaker.tokens, turn.num_outputs, params)
            speaker.again = params

    def _carried(self, turn: Turn, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """The answer as the proxy passes it on."""
        if params is None:
            return None
        carried: dict[str, Any] = json.loads(json.dumps(params))
        self._answers.append(carried)
        random = self.simulation.random
        if turn.proxy is Proxy.FORGETFUL:
            lost = random.choice(KEYS)
            return {key: value for key, value in carried.items() if key != lost}
        if turn.proxy is Proxy.MIXED_UP:
            return random.choice(self._answers)
        return carried

    def _answered(self, speaker: _Speaker, target: PeerEngine) -> None:
        outputs = target._transcripts[str(speaker.at_target)].outputs
        if speaker.again is not None:
            target.submit_with_params(f"{speaker.at_target}-later", speaker.tokens, 2, speaker.again)
            speaker.again = None
        speaker.tokens = [*speaker.tokens, *outputs]
        speaker.turn += 1
        if speaker.turn == len(speaker.talk.turns):
            self._end(speaker)
            return
        generator = Random(1000 * speaker.number + speaker.turn)
        fresh = speaker.talk.turns[speaker.turn].fresh
        speaker.tokens += [generator.randrange(VOCABULARY_TOKENS) for _ in range(fresh)]
        speaker.at_source = speaker.at_target = None

    def _end(self, speaker: _Speaker) -> None:
        speaker.is_over = True
        self._said.append(speaker.tokens)

    # Checks.

    def _check_end(self) -> None:
        for engine in self.engines:
            engine.check_idle()
            left = left_in_scheduler(engine)
            if left:
                raise LeakError(f"{engine.settings.connector}: {left}")
        if kept := self.simulation.kept():
            raise LeakError(kept)
        self._check_reasons()

    def _num_own_answers(self) -> int:
        """Reads of engines that got answers of their own, for prompts with a common beginning."""
        if not any(turn.proxy is Proxy.MIXED_UP for talk in self.scenario.talks for turn in talk.turns):
            return 0
        return sum(words.endswith(f": {CloseReason.SELF}") for words in self.simulation.details)

    def _check_reasons(self) -> None:
        found = self.simulation.failures
        wrong = set(ALWAYS_WRONG)
        if self.sides.refused:
            wrong.discard("refused")
            if self.simulation.outcomes.get("prompt loaded"):
                raise BugError("incompatible engines have exchanged content")
        elif found.get("refused", 0) == self._num_own_answers():
            wrong.discard("refused")
        if not any(isinstance(rule.action, WrongBytes) for rule in self.scenario.plan.rules):
            wrong.add("digest")
        if self.scenario.is_calm:
            wrong |= set(found) - ({"refused"} if self.sides.refused else set())
        if wrong & set(found):
            words = "; ".join(sorted(set(self.simulation.details)))
            raise BugError(f"reads failed for {found} without a reason in the scenario: {words}")


def agents_of(engine: PeerEngine) -> list[Agent]:
    return [runner.connector._worker._agent for runner in engine.runners]  # type: ignore[union-attr]


def left_in_scheduler(engine: PeerEngine) -> str:
    """Finished requests that the scheduler's half still has."""
    half = engine.scheduler_connector._scheduler  # type: ignore[union-attr]
    found = {}
    if half._producer is not None:
        found |= {"offered": len(half._producer._offered), "slots": len(half._producer._slots)}
        found["shortened"] = len(half._producer._shortened)
    if half._consumer is not None:
        found["reads"] = len(half._consumer._loads)
    return ", ".join(f"{name} {number}" for name, number in found.items() if number)


def play(sides: Sides, scenario: PeerScenario, spoil: Callable[[pytest.MonkeyPatch], None] | None = None) -> Play:
    """Runs a scenario and checks everything; returns the run for its counters.

    `spoil` adds a fault to the connector, to see that it is found.
    """
    simulation = Simulation(Random(scenario.seed), scenario.plan)
    with installed(simulation) as patch:
        if not sides.on_a_cpu:
            as_on_a_gpu(patch)
        if spoil is not None:
            spoil(patch)
        played = Play(sides, scenario, simulation)
        try:
            played.run()
        finally:
            for engine in played.engines:
                engine.close()
    return played
