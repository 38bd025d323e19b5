"""Runs requests step by step, and measures each call of a connector's scheduler half."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from life_engine import LifeRequest, Step
from life_sides import Side, Work
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

NOTHING = KVConnectorOutput()
NO_WORK = Work(0, 0)


@dataclass
class LifeTimes:
    """CPU time of the thread in microseconds, by part and by step of the engine, with hits, work and plans."""

    us: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps_us: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    work: Work = NO_WORK
    plans: list[Any] = field(default_factory=list)
    """Plans for the workers, if `keeps_plans`."""
    keeps_plans: bool = False
    _step_us: float = 0.0

    def time(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.thread_time_ns()
        result = call(*arguments)
        us = (time.thread_time_ns() - start) / 1000
        self.us[part] += us
        self._step_us += us
        return result

    def end_step(self) -> None:
        self.steps_us.append(self._step_us)
        self._step_us = 0.0

    @property
    def total_us(self) -> float:
        return sum(self.us.values())

    @property
    def worst_us(self) -> float:
        return max(self.steps_us)


class Driver:
    """Runs requests over one side.

    Args:
        side: the scheduler half under test.
        times: receives the times of the calls.
    """

    def __init__(self, side: Side, times: LifeTimes) -> None:
        self.side, self.engine, self.times = side, side.engine, times
        self._outcome = NOTHING
        """Outcome of the previous step. Workers report it at the end of the next step."""

    def step(self, part: str, step: Step) -> None:
        """Runs one step of the engine. A store that is planned in this step ends with the next step."""
        side, times = self.side, self.times
        output = self.engine.run(step)
        plan = times.time(part, side.plan, output)
        self.engine.computed(step)
        work = side.work(plan)
        times.work = Work(*map(sum, zip(times.work, work, strict=True)))
        if times.keeps_plans:
            times.plans.append(plan)
        ended, self._outcome = self._outcome, side.outcome(plan) or NOTHING
        times.time("load end" if ended.finished_recving else "step end", side.update, ended)
        times.time("report", side.report)
        times.end_step()

    def begin(self, request: LifeRequest) -> int:
        """Looks the request up and allocates its blocks. Returns the number of tokens to load; the next step has the
        load."""
        side, times = self.side, self.times
        times.time("begin", side.begin, request)
        return self.look_up(request)

    def look_up(self, request: LifeRequest) -> int:
        """Looks up a request without blocks, as the engine does for a new request and after a preemption."""
        side, times = self.side, self.times
        found = int(times.time("lookup", side.lookup, request, 0))
        blocks = self.engine.admit(request, found)
        times.time("allocation", side.allocate, request, blocks, found)
        if found:
            times.time("sources", side.sources, request, found)
        times.hit_tokens = found
        return found

    def load(self, request: LifeRequest, num_tokens: int) -> None:
        """Runs the steps in which the request waits for its load."""
        self.step("load plan", Step())
        self.step("load plan", Step())
        request.num_computed_tokens = num_tokens

    def compute(self, request: LifeRequest, *, resumes: bool = False) -> None:
        """Computes the rest of the prompt."""
        engine, is_first, was_loaded = self.engine, True, request.num_computed_tokens > 0
        while request.num_computed_tokens < request.num_tokens:
            if is_first and was_loaded:
                self.times.time("first step", self.side.allocate, request, engine.blocks(request), 0)
            begins = (request,) if is_first else ()
            step = Step(
                {request: engine.next_tokens(request)},
                begun=() if resumes else begins,
                resumed=begins if resumes else (),
            )
            self.step("first step" if is_first and was_loaded else "prefill", step)
            is_first = False

    def decode(self, request: LifeRequest, num_tokens: int) -> None:
        """Computes `num_tokens` of an answer."""
        for _ in range(num_tokens):
            append_token(request, self.engine.hash_tokens)
            self.step("decode", Step({request: 1}))

    def finish(self, request: LifeRequest, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> None:
        """Finishes the request, and runs the steps until its stores have ended."""
        request.status = status
        self.times.time("finish", self.side.finish, request, self.engine.get_block_ids(request.request_id))
        self.engine.free(request)
        self.step("finish", Step(finished=(request,)))
        self.step("finish", Step())

    def live(self, request: LifeRequest, answer_tokens: int) -> None:
        """Runs a request from its beginning to its end."""
        if num_tokens := self.begin(request):
            self.load(request, num_tokens)
        self.compute(request)
        self.decode(request, answer_tokens)
        self.finish(request)

    def preempt(self, request: LifeRequest) -> None:
        """Preempts the request: frees its blocks, looks it up again, and computes the rest."""
        self.engine.free(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        self.step("preemption", Step(preempted=(request,)))
        if num_tokens := self.look_up(request):
            self.load(request, num_tokens)
        self.compute(request, resumes=True)


def append_token(request: LifeRequest, hash_tokens: int) -> None:
    """Adds a token of the answer. Its hashes are invented: no two requests share one."""
    request.num_tokens += 1
    if request.num_tokens % hash_tokens == 0:
        digest = f"{request.request_id} {request.num_tokens}".encode()
        request.block_hashes.append(digest.ljust(32, b"."))
