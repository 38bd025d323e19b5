"""The oracle engine: vLLM's real scheduler and block manager, a real connector of both roles, and the fake runner.

It finds silent corruption: `FakeRunner` compares every byte that attention or a recurrent layer would read with the
expected one, whoever wrote it. At the end of a run nothing may be stuck, leaked or answered wrongly.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections import deque
from typing import TYPE_CHECKING
from unittest import mock

import patience
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from hybridkv.connectors.vllm.offload import connector as offload_connector
from hybridkv.connectors.vllm.offload.worker import DRAIN_S
from oracle.content import Transcript
from oracle.memory import KVMemory, RankShare
from oracle.runner import FakeRunner, OracleError
from oracle.settings import make_configs, of_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorHandshakeMetadata
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from oracle.mixes import Mix
    from oracle.settings import EngineSettings

IDLE_STEPS_LIMIT = 1000
IDLE_PAUSE_S = 0.0005
"""Leaves time for the connector's threads. 0 where it has none."""
IDLE_LIMIT_S = patience.seconds(6.0)
"""A machine may stall for a while with a copy in flight; only a hang lasts this long."""


class StuckError(OracleError):
    """The engine stopped making progress with requests left."""


class LeakError(OracleError):
    """Blocks were not returned, or requests remained."""


class WrongOutputError(OracleError):
    """A request finished with other tokens than it must produce."""


@functools.cache
def _structured_output(config_id: int, config: _ByIdentity) -> StructuredOutputManager:
    return StructuredOutputManager(config.value)


class _ByIdentity:
    """Hashable wrapper, so that one StructuredOutputManager serves all engines of a process."""

    def __init__(self, value: VllmConfig) -> None:
        self.value = value

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity)


class OracleEngine:
    """One engine of one mix. Use as a context manager; `close` shuts the connectors down.

    Attributes for tests: `scheduler_connector`, `worker_connector` (None without a connector), `scheduler`, `runner`,
    `memory`, and the counters `restored_tokens` (asked of the connector), `local_hit_tokens`, `failed_loads`,
    `preemptions`, `refused_resets`, `num_steps`. `before_step(engine, step)` runs before every step.
    """

    def __init__(
        self,
        mix: Mix,
        settings: EngineSettings,
        before_step: Callable[[OracleEngine, int], None] | None = None,
    ) -> None:
        self.mix = mix
        self.settings = settings
        self.before_step = before_step
        self.restored_tokens = self.local_hit_tokens = self.failed_loads = self.preemptions = self.num_steps = 0
        self.refused_resets = 0
        self._is_whole = True
        """No step has ended with an error."""
        self._aborts_in_step: list[str] = []
        self._transcripts: dict[str, Transcript] = {}
        self._open: set[str] = set()
        self._produced: dict[str, list[int]] = {}
        self._fresh_blocks: list[int] = []
        self._unprocessed: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        """Steps that have run and that the scheduler has not processed yet: at most one, if it plans ahead."""
        self._local_tokens: dict[str, int] = {}
        """Tokens that the engine found in its own cache when it last called its connector about a request."""
        self._prompts: dict[tuple[tuple[int, ...], int, int], Transcript] = {}
        configs = make_configs(mix, settings)
        self.configs = configs
        config = configs.vllm
        with set_current_vllm_config(config):
            scheduler_class = AsyncScheduler if settings.async_scheduling else Scheduler
            self.scheduler: Scheduler = scheduler_class(
                vllm_config=config,
                kv_cache_config=configs.scheduler,
                structured_output_manager=_structured_output(0, _ByIdentity(config)),
                block_size=configs.block_tokens,
                hash_block_size=configs.hash_tokens,
            )
            self.scheduler.use_v2_model_runner = settings.runner == "v2"
            self.scheduler_connector: KVConnectorBase_V1 | None = self.scheduler.connector
            self.runners = [self._make_runner(rank) for rank in range(settings.tp_size)]
            self.runner, self.memory = self.runners[0], self.runners[0].memory
            self.worker_connector: KVConnectorBase_V1 | None = self.runner.connector
            self._aggregator = KVOutputAggregator(settings.tp_size)
            self._exchange_handshakes()
        self._hasher = None
        if settings.prefix_caching or settings.connector is not None:
            hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self._hasher = get_request_block_hasher(configs.hash_tokens, hash_function)
        self._watch()
        self._num_free_blocks = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _make_runner(self, rank: int) -> FakeRunner:
        """One tensor-parallel rank, with a connector of its own."""
        config = of_rank(self.configs.vllm, rank)
        connector = None
        if self.settings.connector is not None:
            connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.configs.worker)
        share = RankShare(rank, self.settings.tp_size)
        memory = KVMemory(config, self.configs.worker, self.mix, self.settings.seed + rank, share)
        return self._runner_of(memory, connector)

    def _runner_of(self, memory: KVMemory, connector: KVConnectorBase_V1 | None) -> FakeRunner:
        return FakeRunner(
            self.mix,
            memory,
            self.settings.runner,
            self._transcripts,
            connector,
            self._local_tokens,
            saves_last=self.settings.saves_last,
        )

    def _exchange_handshakes(self) -> None:
        """As EngineCore does once both halves exist and the caches are registered (v1/engine/core.py)."""
        if self.scheduler_connector is None:
            return
        told = {
            (0, rank): runner.connector.get_handshake_metadata()
            for rank, runner in enumerate(self.runners)
            if runner.connector is not None
        }
        carried: dict[tuple[int, int], KVConnectorHandshakeMetadata] = pickle.loads(
            pickle.dumps({place: metadata for place, metadata in told.items() if metadata is not None})
        )
        if carried:
            self.scheduler_connector.set_xfer_handshake_metadata_pp_aware(carried)

    def _execute(self, output: SchedulerOutput, fresh: Sequence[int]) -> ModelRunnerOutput:
        """Executes on all ranks, as an executor does."""
        results = [runner.execute(output, fresh) for runner in self.runners]
        if len(results) == 1:
            return results[0]
        merged = self._aggregator.aggregate(list(results))
        assert merged is not None
        return merged

    def __enter__(self) -> OracleEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_whole &= kind is None
        self.close()

    def _watch(self) -> None:
        """Records which blocks leave the free pool, and how many tokens come from the engine and from the connector."""
        pool = self.scheduler.kv_cache_manager.block_pool
        take = pool.get_new_blocks

        def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
            blocks = take(num_blocks)
            self._fresh_blocks.extend(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = get_new_blocks  # type: ignore[method-assign]
        connector = self.scheduler_connector
        if connector is None:
            return
        update = connector.update_state_after_alloc

        def update_state_after_alloc(request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
            self.restored_tokens += num_external_tokens
            update(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = update_state_after_alloc  # type: ignore[method-assign]
        ask = connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
            self._local_tokens[request.request_id] = num_computed_tokens
            return ask(request, num_computed_tokens)

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens  # type: ignore[method-assign]

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        num_outputs: int,
        lora: LoRARequest | None = None,
        model: int | None = None,
        skips_prefix_cache: bool = False,
        transfer_params: object = None,
    ) -> None:
        """Adds a request. It must produce exactly `num_outputs` correct tokens, unless it is aborted.

        With an adapter, `model` is the number of the adapter weights that the engine holds: another number is another
        model.
        """
        salt = self.settings.model if model is None else model
        key = (tuple(prompt), num_outputs, salt)
        transcript = self._prompts.get(key)
        if transcript is None:
            transcript = self._prompts[key] = Transcript(prompt, num_outputs, salt)
        self._transcripts[request_id] = transcript
        self._open.add(request_id)
        self._produced[request_id] = []
        parameters = SamplingParams(
            max_tokens=num_outputs,
            temperature=0.0,
            ignore_eos=True,
            skip_reading_prefix_cache=skips_prefix_cache,
            extra_args=None if transfer_params is None else {"kv_transfer_params": transfer_params},
        )
        request = Request(request_id, list(prompt), parameters, None, lora_request=lora, block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def outputs(self, request_id: str) -> list[int]:
        """The tokens that a request has produced so far."""
        return list(self._produced[request_id])

    def abort(self, request_id: str, *, in_step: bool = False) -> None:
        """Aborts a request, now or (`in_step`) between the next forward and the processing of its output."""
        if in_step:
            self._aborts_in_step.append(request_id)
        elif request_id in self._open:
            self._open.discard(request_id)
            self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def preempt_all(self) -> None:
        """Preempts every running request and resets the prefix cache, as far as vLLM does so.

        vLLM raises if blocks are held by anything but running requests: loads in flight, or pins of a connector. By
        then the preemptions have happened. `refused_resets` counts these cases.
        """
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:
            self.refused_resets += 1

    def step(self) -> bool:
        """One engine step; False when there was nothing to do. Raises OracleError when something is wrong."""
        self._is_whole = False
        is_busy = self._step()
        self._is_whole = True
        return is_busy

    def _step(self) -> bool:
        if self.before_step is not None:
            self.before_step(self, self.num_steps)
        if not self.scheduler.has_requests():
            if self._unprocessed:
                self._process(*self._unprocessed.popleft())
                return True
            return False
        self.num_steps += 1
        output = self.scheduler.schedule()
        fresh, self._fresh_blocks[:] = list(self._fresh_blocks), []
        self.preemptions += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self.local_hit_tokens += new.num_computed_tokens
        self._unprocessed.append((output, self._execute(output, fresh)))
        # As EngineCore.step_with_batch_queue: a batch after another one is planned first.
        if len(self._unprocessed) > self.settings.async_scheduling or not output.total_num_scheduled_tokens:
            self._process(*self._unprocessed.popleft())
        if output.total_num_scheduled_tokens == 0 and self.worker_connector is not None and IDLE_PAUSE_S:
            time.sleep(IDLE_PAUSE_S)
        return output.total_num_scheduled_tokens > 0

    def _process(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """The scheduler processes the result of a step."""
        if result.kv_connector_output is not None:
            self.failed_loads += len(result.kv_connector_output.failed_recving)
        for request_id in self._aborts_in_step:
            self.abort(request_id)
        self._aborts_in_step.clear()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                self._produced[each.request_id].extend(each.new_token_ids)
                if each.finish_reason is not None:
                    self._finish(each.request_id)

    def _finish(self, request_id: str) -> None:
        self._open.discard(request_id)
        expected = self._transcripts[request_id].outputs
        if self._produced[request_id] != expected:
            raise WrongOutputError(f"{request_id}: produced {self._produced[request_id]}, expected {expected}")

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.has_requests() and not self._unprocessed

    def drain(self) -> None:
        """Steps until nothing is left to do; StuckError after too many steps and seconds without a scheduled token."""
        idle, progress_s = 0, time.monotonic()
        while not self.is_idle:
            idle = 0 if self.step() else idle + 1
            if idle == 0:
                progress_s = time.monotonic()
            is_stuck = idle > IDLE_STEPS_LIMIT and time.monotonic() - progress_s > IDLE_LIMIT_S
            if is_stuck or (idle > 50 and self.worker_connector is None):
                raise StuckError(f"no token scheduled in {idle} steps; left: {self._left()}")

    def _left(self) -> str:
        states = {name: request.status.name for name, request in self.scheduler.requests.items()}
        return f"{states}, {self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()} free blocks"

    def check_idle(self) -> None:
        """After `drain`: every request has finished or is aborted, every block is back, the worker holds no request."""
        if self._open or self.scheduler.requests:
            raise LeakError(f"requests left: {sorted(self._open)} {self._left()}")
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free != self._num_free_blocks:
            raise LeakError(f"{self._num_free_blocks - free} blocks were not returned")

    def reset_prefix_cache(self) -> None:
        """Clears the engine's own cache; call when idle."""
        if not self.scheduler.reset_prefix_cache():
            raise LeakError("the engine's prefix cache cannot be reset while idle: blocks are still referenced")

    def reset_connector(self) -> bool:
        """Resets the connector's cache; returns its answer."""
        return self.scheduler.reset_connector_cache()

    def close(self) -> None:
        # Transfers of a step that ended with an error never arrive: the shutdown does not wait for them.
        drain_s = DRAIN_S if self._is_whole else offload_connector.CLOSE_RESERVE_S
        with mock.patch.object(offload_connector, "DRAIN_S", drain_s):
            for connector in (*(runner.connector for runner in self.runners), self.scheduler_connector):
                if connector is not None:
                    connector.shutdown()
