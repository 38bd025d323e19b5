"""The fake model runner: real bookkeeping, no model. It checks every byte that a real forward pass would read.

Mirrors how vLLM 0.32's runners execute a SchedulerOutput (v1/worker/gpu_model_runner.py, v1/worker/gpu/model_runner.py,
v1/worker/mamba_utils.py) and in which order they call a connector, which tests/contract/test_step_order.py compares
with vLLM's own. No speculation. Where steps are planned ahead, each still runs at once, and the scheduler processes it
one step later.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from oracle.mixes import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput

    from oracle.content import Transcript, Words
    from oracle.memory import KVMemory, Plane
    from oracle.mixes import Mix

Table = np.ndarray[tuple[int], np.dtype[np.int64]]


class OracleError(AssertionError):
    """The state of the engine is wrong because of the connector."""


class CorruptionError(OracleError):
    """A forward pass would have read wrong bytes."""


@dataclass(slots=True)
class _Running:
    """Worker state of a request. Tables are append-only: freed entries keep their stale ids."""

    transcript: Transcript
    tables: list[Table]
    num_computed: int
    num_known: int
    local_tokens: int
    """Number of tokens at its start that came from the engine's own cache."""
    is_misled: bool = False
    """It read wrong bytes from the engine's own cache, so everything that it computes is wrong."""
    state_slot: int | None = None


@dataclass(slots=True)
class _Work:
    """One scheduled request in one step: tokens `[start, end)` are computed."""

    request_id: str
    running: _Running
    start: int
    end: int


class FakeRunner:
    """Owns the KV memory of one worker and executes SchedulerOutputs. Not thread safe; threads of the connector are.

    Wrong bytes in the engine's own cache are no error if `Mix.misleads`, as long as no connector serves them. A request
    that reads some is not checked any more, and its results are wrong.

    Args:
        mix: the model's groups.
        memory: their cache.
        order: order of the calls of a step.
        transcripts: what each request must read and produce.
        connector: under test.
        local_tokens: tokens that each request found in the engine's own cache when it was admitted; only the engine can
            have provided these.
        saves_last: whether the connector saves after the results of the step were taken, as with a drafter.
    """

    def __init__(
        self,
        mix: Mix,
        memory: KVMemory,
        order: Literal["v1", "v2"],
        transcripts: Mapping[str, Transcript],
        connector: KVConnectorBase_V1 | None,
        local_tokens: Mapping[str, int],
        *,
        saves_last: bool = False,
    ) -> None:
        self.mix = mix
        self.memory = memory
        self.connector = connector
        self.num_checked_cells = self.num_misled = 0
        self._local_tokens = local_tokens
        self._order = order
        self._saves_last = saves_last
        self._transcripts = transcripts
        self._running: dict[str, _Running] = {}
        if connector is not None:
            connector.register_kv_caches(memory.tensors)

    def execute(self, output: SchedulerOutput, fresh_blocks: Sequence[int]) -> ModelRunnerOutput:
        """Runs one step. `fresh_blocks` were taken from the free pool for this step: their bytes are garbage."""
        metadata = None
        if self.connector is not None:
            metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        if self._order == "v1":
            if self.connector is not None:
                self.connector.handle_preemptions(metadata)
            self._launch(lambda: self.memory.poison(fresh_blocks))
            self._update_states(output)
            work = self._work(output)
            self._move_states(work)
        else:
            # Runner 2 zeroes and copies before it calls the connector; only the forward itself comes after.
            self._update_states(output, lambda: self._launch(lambda: self.memory.poison(fresh_blocks)))
            work = self._work(output)
            self._move_states(work)
            if self.connector is not None:
                self.connector.handle_preemptions(metadata)
        if self.connector is None:
            self._forward(work)
            connector_output = None
        else:
            self.connector.bind_connector_metadata(metadata)
            connector_output = self._forward_with_connector(self.connector, output, work)
        return self._result(work, connector_output)

    def _launch(self, compute: Callable[[], None]) -> None:
        """Runs work on the cache, in order. Here it runs at once."""
        compute()

    def _update_states(self, output: SchedulerOutput, before: Callable[[], None] | None = None) -> None:
        for request_id in output.finished_req_ids:
            self._running.pop(request_id, None)
        if before is not None:
            before()
        if output.new_block_ids_to_zero:
            zeroed = list(output.new_block_ids_to_zero)
            self._launch(lambda: self.memory.zero(zeroed))
        if output.kv_cache_block_copies:
            copies = [(pair[0], pair[1]) for pair in output.kv_cache_block_copies]
            self._launch(lambda: self.memory.copy_blocks(copies))
        for request_id in output.preempted_req_ids or ():
            if request_id in self._running:
                self._running[request_id].state_slot = None
        for new in output.scheduled_new_reqs:
            transcript = self._transcripts[new.req_id]
            known = new.prefill_token_ids or new.prompt_token_ids
            if known is None or known != transcript.tokens[: len(known)]:
                raise OracleError(f"{new.req_id}: scheduled with tokens that are not its own")
            tables = [np.array(ids, dtype=np.int64) for ids in new.block_ids]
            local = self._local_tokens.get(new.req_id, new.num_computed_tokens)
            self._running[new.req_id] = _Running(transcript, tables, new.num_computed_tokens, len(known), local)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            running = self._running[request_id]
            running.num_computed = cached.num_computed_tokens[index]
            running.num_known = running.transcript.num_prompt_tokens + cached.num_output_tokens[index]
            added = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                assert added is not None
                running.tables = [np.array(ids, dtype=np.int64) for ids in added]
                running.state_slot = None
                running.is_misled = False
                running.local_tokens = self._local_tokens.get(request_id, running.num_computed)
            elif added is not None:
                running.tables = [
                    np.concatenate((table, np.array(ids, dtype=np.int64))) if ids else table
                    for table, ids in zip(running.tables, added, strict=True)
                ]

    def _work(self, output: SchedulerOutput) -> list[_Work]:
        work = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            running = self._running[request_id]
            work.append(_Work(request_id, running, running.num_computed, running.num_computed + num_tokens))
        return work

    def _move_states(self, work: list[_Work]) -> None:
        """Copies each running state to the slot in which this step leaves it. Before any load of this step starts."""
        recurrent = [group for group in self.mix.groups if group.kind is Kind.RECURRENT]
        if not recurrent:
            return
        block_tokens = recurrent[0].block_tokens
        for item in work:
            previous = item.running.state_slot
            if previous is None:
                previous = (item.start - 1) // block_tokens
            current = math.ceil(item.end / block_tokens) - 1
            item.running.state_slot = current
            if previous in (-1, current):
                continue
            self._launch(partial(self._move_state, item.running.tables, previous, current))

    def _move_state(self, tables: list[Table], previous: int, current: int) -> None:
        for planes in self.memory.planes:
            for plane in (plane for plane in planes if plane.recurrent):
                plane.words[tables[plane.group][current]] = plane.words[tables[plane.group][previous]]

    def _forward_with_connector(
        self, connector: KVConnectorBase_V1, output: SchedulerOutput, work: list[_Work]
    ) -> KVConnectorOutput:
        if output.has_sync_kv_loads:
            connector.start_load_kv(None)  # type: ignore[arg-type]
        self._forward(work)
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)  # type: ignore[arg-type]
        if not self._saves_last:
            connector.wait_for_save()
        transfers = connector.get_transfer_results(set(output.finished_req_ids))
        result = KVConnectorOutput(
            finished_sending=transfers.finished_sending,
            finished_recving=transfers.finished_recving,
            failed_recving=transfers.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        if self._saves_last:
            connector.wait_for_save()
        connector.clear_connector_metadata()
        loaded: KVConnectorOutput = pickle.loads(pickle.dumps(result))
        return loaded

    def _forward(self, work: list[_Work]) -> None:
        if not work:
            return
        planes = [plane for of_group in self.memory.planes for plane in of_group]
        for plane in sorted(planes, key=lambda plane: not plane.recurrent):
            if plane.recurrent:
                self._launch(partial(self._advance_states, plane, work))
                continue
            if self.connector is not None:
                for name in plane.layer_names:
                    self.connector.wait_for_layer_load(name)
            self._launch(partial(self._attend, plane, work))
            if self.connector is not None:
                for name in plane.layer_names:
                    self.connector.save_kv_layer(name, self.memory.tensors[name], None)  # type: ignore[arg-type]

    def _attend(self, plane: Plane, work: list[_Work]) -> None:
        # A layer writes the new tokens of the whole batch before it attends: in this very step, a request may read a
        # shared block that another request fills.
        for item in work:
            self._write(plane, item)
        for item in work:
            self._check(plane, item)

    def _advance_states(self, plane: Plane, work: list[_Work]) -> None:
        for item in work:
            slot = item.running.state_slot
            assert slot is not None
            block = int(item.running.tables[plane.group][slot])
            expected = plane.expected(item.running.transcript)
            if block == 0:
                raise CorruptionError(f"{item.request_id}: group {plane.group} keeps its state in the null block")
            state = plane.words[block, 0]
            if item.start > 0 and not item.running.is_misled:
                self.num_checked_cells += 1
                if not np.array_equal(state, expected[item.start - 1]):
                    self._on_wrong(plane, item, np.array([block]), item.start - 1, state[None])
            state[...] = ~expected[item.end - 1] if item.running.is_misled else expected[item.end - 1]

    def _write(self, plane: Plane, item: _Work) -> None:
        first, end = item.start // plane.tokens_per_cell, item.end // plane.tokens_per_cell
        if first == end:
            return
        blocks, slots = plane.locate(item.running.tables[plane.group], first, end)
        if not blocks.all():
            raise CorruptionError(f"{item.request_id}: group {plane.group} writes to the null block")
        cells = plane.expected(item.running.transcript)[first:end]
        plane.words[blocks, slots] = ~cells if item.running.is_misled else cells

    def _check(self, plane: Plane, item: _Work) -> None:
        if item.running.is_misled:
            return
        first, end = self._first_read(plane, item.start) // plane.tokens_per_cell, item.start // plane.tokens_per_cell
        if first >= end:
            return
        blocks, slots = plane.locate(item.running.tables[plane.group], first, end)
        found = plane.words[blocks, slots]
        self.num_checked_cells += end - first
        if not blocks.all() or not np.array_equal(found, plane.expected(item.running.transcript)[first:end]):
            self._on_wrong(plane, item, blocks, first, found)

    def _first_read(self, plane: Plane, num_computed: int) -> int:
        """The first token that the next token reads in this group."""
        group = self.mix.groups[plane.group]
        if group.kind is Kind.WINDOW:
            return max(0, num_computed - group.reach_tokens + 1)
        if group.kind is Kind.CHUNKED:
            return num_computed // group.reach_tokens * group.reach_tokens
        return 0

    def _on_wrong(self, plane: Plane, item: _Work, blocks: Table, first: int, found: Words) -> None:
        """Handles wrong cells: an error, unless all of them are from the engine's own cache and the engine is known to
        keep wrong states there."""
        expected = plane.expected(item.running.transcript)[first : first + len(found)]
        is_wrong = (found != expected).reshape(len(found), -1).any(axis=1)
        last = first + int(np.flatnonzero(is_wrong)[-1]) if is_wrong.any() else first
        is_own = (last + 1) * plane.tokens_per_cell <= item.running.local_tokens
        if not (self.mix.misleads and is_own and blocks.all()):
            self._report(plane, item, blocks, first, found)
            return
        item.running.is_misled = True
        self.num_misled += 1

    def _report(self, plane: Plane, item: _Work, blocks: Table, first: int, found: Words) -> None:
        """Raises an error with the wrong cell and its actual content."""
        expected = plane.expected(item.running.transcript)
        wrong = np.flatnonzero((found != expected[first : first + len(found)]).reshape(len(found), -1).any(axis=1))
        row = int(wrong[0]) if len(wrong) else int(np.flatnonzero(blocks == 0)[0])
        cell = found[row]
        if blocks[row] == 0:
            held = "the null block"
        elif not cell.any():
            held = "zeros"
        else:
            same = [
                f"layer {layer}: the bytes of cell {int(at)} of layer {source}"
                for layer in range(cell.shape[0])
                for source in range(cell.shape[0])
                for at in np.flatnonzero((expected[:, source] == cell[layer]).reshape(len(expected), -1).all(axis=1))
            ]
            held = "; ".join(same[:4]) or "bytes that are not of this request"
        raise CorruptionError(
            f"{item.request_id} at {item.start} computed tokens: group {plane.group} "
            f"({self.mix.groups[plane.group].kind.value}, layers {plane.layer_names}) cell {first + row} "
            f"(last token {(first + row + 1) * plane.tokens_per_cell - 1}) in block {int(blocks[row])} holds {held}; "
            f"{len(wrong)} of {len(found)} cells are wrong"
        )

    def _result(self, work: list[_Work], connector_output: KVConnectorOutput | None) -> ModelRunnerOutput:
        sampled = [
            [item.running.transcript.tokens[item.end]] if item.end == item.running.num_known else [] for item in work
        ]
        request_ids = [item.request_id for item in work]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )
