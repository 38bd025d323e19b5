"""Two oracle engines: the consumer resumes the prompts that the producer computed. The connector is the real one of
both.

Both run in this process and take steps in turn. The connector's threads and control connections are real; bytes go
through the in-memory transport.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from hybridkv.connectors.vllm.nixl import worker
from kits.peers.in_memory import InMemoryTransport, World
from oracle.content import VOCABULARY_TOKENS, Transcript
from oracle.engine import IDLE_LIMIT_S, OracleEngine, StuckError
from oracle.mixes import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oracle.mixes import Mix
    from oracle.settings import EngineSettings


# For reads that must succeed, however slow the machine is.
CALM = {"connect_timeout_seconds": IDLE_LIMIT_S / 2, "load_timeout_seconds": 3 * IDLE_LIMIT_S}


class PeerEngine(OracleEngine):
    """An engine of a pair. `answered` holds the connector's parameters of each request that finished."""

    def __init__(self, mix: Mix, settings: EngineSettings) -> None:
        super().__init__(mix, settings)
        self.answered: dict[str, dict[str, Any] | None] = {}
        connector = self.scheduler_connector
        assert connector is not None
        finish = connector.request_finished_all_groups  # type: ignore[attr-defined]

        def finished(request: Request, block_ids: Any) -> Any:
            holds, params = finish(request, block_ids)
            self.answered[request.request_id] = params
            return holds, params

        connector.request_finished_all_groups = finished  # type: ignore[attr-defined]

    def submit_with_params(
        self,
        request_id: str,
        prompt: Sequence[int],
        num_outputs: int,
        params: dict[str, Any] | None,
        withheld_tokens: int = 0,
    ) -> None:
        """Adds a request with `kv_transfer_params`. This engine omits the last `withheld_tokens` of it."""
        kept = list(prompt)[: len(prompt) - withheld_tokens]
        self._transcripts[request_id] = Transcript(kept, num_outputs, self.settings.model)
        self._open.add(request_id)
        self._produced[request_id] = []
        parameters = SamplingParams(
            max_tokens=num_outputs,
            temperature=0.0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        self.scheduler.add_request(Request(request_id, list(prompt), parameters, None, block_hasher=self._hasher))


def withheld_tokens(mix: Mix) -> int:
    """Tokens of a prompt that a producer leaves to its consumer."""
    return 0 if all(group.kind is Kind.FULL for group in mix.groups) else 1


class Pair:
    """A producer and a consumer."""

    def __init__(self, mix: Mix, producer: EngineSettings, consumer: EngineSettings) -> None:
        self.mix = mix
        self.withheld_tokens = withheld_tokens(mix)
        world = World()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "open_transport", lambda name: InMemoryTransport(name, world))
            self.producer = PeerEngine(mix, producer)
            self.consumer = PeerEngine(mix, consumer)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exception: object) -> None:
        self.producer.close()
        self.consumer.close()

    def prefill(self, request_id: str, prompt: Sequence[int]) -> dict[str, Any] | None:
        """The producer computes a prompt; returns its transfer parameters."""
        withheld = self.withheld_tokens if len(prompt) > self.withheld_tokens else 0
        self.producer.submit_with_params(request_id, prompt, 1, {"do_remote_decode": True}, withheld)
        self.until(lambda: request_id in self.producer.answered)
        return self.producer.answered[request_id]

    def decode(self, request_id: str, prompt: Sequence[int], num_outputs: int, params: dict[str, Any] | None) -> None:
        """Submits the prompt to the consumer."""
        self.consumer.submit_with_params(request_id, prompt, num_outputs, params)

    def step(self) -> bool:
        """One step of each engine with work. False if nothing was computed."""
        ours, theirs = self.producer.step(), self.consumer.step()
        return ours or theirs

    def until(self, is_done: Callable[[], bool]) -> None:
        """Steps until the condition holds; StuckError after seconds without a token."""
        progress_s = time.monotonic()
        while not is_done():
            if self.step():
                progress_s = time.monotonic()
            elif time.monotonic() - progress_s > IDLE_LIMIT_S:
                raise StuckError(f"{self.producer._left()}; {self.consumer._left()}")

    def drain(self) -> None:
        """Steps until both are idle, then checks for leaks."""
        self.until(lambda: self.producer.is_idle and self.consumer.is_idle)
        self.producer.check_idle()
        self.consumer.check_idle()


def tokens(count: int, seed: int) -> list[int]:
    """A prompt."""
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY_TOKENS) for _ in range(count)]


def require_handed_over(pair: Pair, lengths: Sequence[int]) -> None:
    """Prompts of these lengths are restored up to their last token, one after the other."""
    for number, num_tokens in enumerate(lengths):
        prompt = tokens(num_tokens, seed=num_tokens)
        pair.consumer.restored_tokens = 0
        pair.decode(f"d{number}", prompt, 5, pair.prefill(f"p{number}", prompt))
        pair.drain()
        assert pair.consumer.restored_tokens == num_tokens - 1
    assert pair.consumer.failed_loads == 0
