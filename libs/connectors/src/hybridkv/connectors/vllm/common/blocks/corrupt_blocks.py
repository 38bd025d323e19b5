"""Corrupt blocks: blocks of the engine with content that does not match their hash, and the requests that use them.

There are four kinds:

- Bad copies. If the engine's own hit ends inside a block, the engine copies this block. vLLM 0.32 has two bugs. If the
  memory of several layers begins at one address, it copies as many bytes as a page of the first of these layers, even
  if the other layers have larger pages (see `compat.copies_whole_blocks`). And it reads all sources before it writes a
  destination, although one copy of a step may depend on another copy.
- Misfiled states. If a recurrent group has larger blocks than another group, a prefill may end inside a recurrent block
  (see `compat.prefill_cut_tokens`). The engine then treats the state at this point as the state at the end of the
  block: it caches the state, and hands it over when the request's next prefill chunk reaches the end of the block. This
  module recognizes such a state because that chunk goes on beyond the end of the block. The same happens in an engine
  whose hits may end inside blocks, if the backend saves a state inside the last chunk of a prompt: this chunk does not
  stop at the end of the block in which it begins. Of the states inside such a chunk, only the saved one is correct.
- States of dropped steps. A session (see `compat.is_session`) continues after an answer from the state in its blocks.
  With asynchronous scheduling, a stop token may end the answer while the next step is in flight. That step has the stop
  token as its input, and adds it to the state. vLLM drops this token and the output of the step. It computes the
  attention content at this position again, but not the state.
  With a drafter, the state may also lie in another block. This module compares the token at which a session continues
  with the token at which its last step ended. With a drafter, this token is unknown, and the state counts as wrong.
- Uncomputed blocks, see `uncomputed_blocks`. They are evicted before a request can use them.

A request that continues from a corrupt block computes wrong content. The engine caches this content under correct
hashes, so later hits on the content are wrong too. Such a request is "misled": no tier and no peer may get its content.
Misfiled states are also evicted from the engine's own cache.

This module repairs nothing else in the engine, and reads no bytes. A block that may be corrupt in one of these ways
counts as corrupt.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hybridkv.connectors.errors import printable
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.uncomputed_blocks import UncomputedBlocks
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK
from hybridkv.planner import GroupKind, State

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from hybridkv.connectors.vllm.common.layout import CacheLayout
    from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
    from hybridkv.planner import GroupSpec

logger = logging.getLogger("vllm.hybridkv.scheduler")

DROPPED_STEP = "dropped_step"
"""Cause of a misled session: its state contains a token that the engine has dropped."""


def partly_copied_groups(vllm_config: VllmConfig, layout: CacheLayout) -> frozenset[int]:
    """Groups with blocks that the engine may copy only in part: groups with a page larger than the smallest page.
    Empty if the engine copies whole blocks, or if the pages of a block lie side by side."""
    smallest = min((layer.page_bytes for layers in layout.layers for layer in layers), default=0)
    larger = frozenset(
        index for index, layers in enumerate(layout.layers) if any(layer.page_bytes > smallest for layer in layers)
    )
    if not larger or compat.has_blocks_outermost(vllm_config) or compat.copies_whole_blocks():
        return frozenset()
    return larger


def groups_with_misfiled_states(vllm_config: VllmConfig, groups: Sequence[GroupSpec]) -> frozenset[int]:
    """RECURRENT groups with blocks inside which the engine may end a prefill."""
    cut_tokens = compat.prefill_cut_tokens(vllm_config)
    return frozenset(
        index
        for index, group in enumerate(groups)
        if group.kind is GroupKind.RECURRENT and group.block_tokens > cut_tokens
    )


def misfiled_blocks(
    output: SchedulerOutput, groups: Container[int], inner_checkpoints: Mapping[int, compat.CheckpointOf]
) -> list[int]:
    """Blocks of states that are handed over for a boundary where no prefill chunk of the request ended.

    The engine hands over a state in the step that passes its boundary. So the state of a boundary strictly inside this
    step's chunk is wrong: the prefill stopped only at the start and at the end of the chunk. It is correct only if the
    backend saves this state inside the chunk. A state of a boundary before the chunk is correct: accepted drafts have
    passed this boundary, and the state comes from the worker.

    Args:
        output: step of the engine.
        groups: groups that may have such states, see `groups_with_misfiled_states`.
        inner_checkpoints: groups that may have such states too, see `compat.inner_checkpoints`.
    """
    handed_over = compat.boundary_states(output)
    if not handed_over:
        return []
    chunks = compat.computed_tokens(output)
    blocks = []
    for request_id, states in handed_over.items():
        start, end = chunks.get(request_id, (0, 0))
        for group, block_id, boundary in states:
            if not start < boundary < end:
                continue
            checkpoint = inner_checkpoints.get(group)
            if group in groups if checkpoint is None else boundary != checkpoint(start, end):
                blocks.append(block_id)
    return blocks


def without_states(output: SchedulerOutput, block_ids: Container[int]) -> AbstractContextManager[None]:
    """Context in which the step does not hand over the states in these blocks."""
    return compat.with_boundary_states(
        output,
        {
            request_id: [state for state in states if state[1] not in block_ids]
            for request_id, states in compat.boundary_states(output).items()
        },
    )


@dataclass(frozen=True, slots=True)
class SuspectGroups:
    """Groups that may have corrupt blocks.

    Args:
        partly_copied: groups with blocks that the engine may copy only in part.
        with_misfiled_states: RECURRENT groups with blocks inside which a prefill may end.
        inner_checkpoints: RECURRENT groups that may have misfiled states too, see `compat.inner_checkpoints`.
        max_uncomputed_tokens: see `compat.max_uncomputed_tokens`. All groups may have uncomputed blocks.
    """

    partly_copied: frozenset[int] = frozenset()
    with_misfiled_states: frozenset[int] = frozenset()
    inner_checkpoints: Mapping[int, compat.CheckpointOf] = field(default_factory=dict)
    max_uncomputed_tokens: int = 0


def suspect_groups(connector: str, vllm_config: VllmConfig, layout: CacheLayout) -> SuspectGroups:
    """Groups that may have corrupt blocks in this engine. Logs a warning about misfiled states.

    Args:
        connector: name of the connector, for the warning.
        vllm_config: configuration of the engine's scheduler.
        layout: layout of the engine's groups.
    """
    warning = misfiled_warning(connector, vllm_config, layout.spec.groups)
    if warning:
        logger.warning("%s", warning)
    return SuspectGroups(
        partly_copied_groups(vllm_config, layout),
        groups_with_misfiled_states(vllm_config, layout.spec.groups),
        layout.inner_checkpoints,
        compat.max_uncomputed_tokens(vllm_config),
    )


def misfiled_warning(connector: str, vllm_config: VllmConfig, groups: Sequence[GroupSpec]) -> str:
    """Warning about misfiled states; "" if this engine has none. `groups`: specs of the engine's groups."""
    misfiled = groups_with_misfiled_states(vllm_config, groups)
    if not misfiled:
        return ""
    sizes = ", ".join(str(groups[index].block_tokens) for index in sorted(misfiled))
    return (
        f"{connector}: RECURRENT groups {sorted(misfiled)} have larger blocks ({sizes} tokens) than another group "
        f"({compat.prefill_cut_tokens(vllm_config)}). This version of vLLM may end prefill inside such a block and "
        "cache the state as the one at the end of the block (vllm-project/vllm#54076). This connector does not store "
        "such states and evicts them from vLLM's cache, so fewer prompts resume. Without a connector vLLM may resume "
        "requests from them and answer wrongly. Use a fixed vLLM, or blocks of one size"
    )


class MisledCounter(Protocol):
    """Counts requests that continue from a corrupt block."""

    def count_misled(self, cause: str) -> None: ...


@dataclass(slots=True)
class _Session:
    request: Request
    state_tokens: int | None
    """Token at which the last step ended, so the number of tokens in the state. None before the first step, and after
    the engine starts the session over. -1 if it is unknown: with asynchronous scheduling, the start of a step after
    drafts contains drafts that the engine may still reject."""


class CorruptBlocks:
    """Tracks corrupt blocks from step to step.

    Args:
        groups: the engine's groups.
        metrics: counts misled requests.
    """

    def __init__(self, groups: Sequence[GroupSpec], metrics: MisledCounter) -> None:
        self._block_tokens = tuple(group.block_tokens for group in groups)
        self._has_states = any(group.kind is GroupKind.RECURRENT for group in groups)
        self._metrics = metrics
        self.suspects = SuspectGroups()
        self._pool: BlockPool | None = None
        self._corrupt: dict[int, Any] = {}
        """Corrupt blocks by id, each with the hash that it had when it was last marked. At most as many as the engine
        has blocks."""
        self._misled: dict[str, list[int]] = {}
        """Running misled requests. Each has one number for each group: the first position in its block table whose
        block may still get another hash."""
        self._sessions: dict[str, _Session] = {}
        """Sessions of a model with RECURRENT groups."""
        self._warned: set[bool] = set()
        """Logged warnings: True for the one about sessions."""

    @property
    def suspects(self) -> SuspectGroups:
        """Groups that may have corrupt blocks. Must be set before a request is tracked."""
        return self._suspects

    @suspects.setter
    def suspects(self, suspects: SuspectGroups) -> None:
        self._suspects = suspects
        self._uncomputed_blocks = UncomputedBlocks(len(self._block_tokens), suspects.max_uncomputed_tokens)

    @property
    def misled(self) -> Iterable[str]:
        """Requests that continue from a corrupt block, and have neither started over nor ended since."""
        return self._misled.keys()

    def bind(self, pool: BlockPool) -> None:
        """Sets the engine's block pool."""
        self._pool = pool

    def track(self, request: Request) -> None:
        """Starts to track a request. Ignores a tracked request."""
        self._uncomputed_blocks.track(request)
        if not self._has_states or not compat.is_session(request):
            return
        known = self._sessions.get(request.request_id)
        if known is None or known.request is not request:
            self._sessions[request.request_id] = _Session(request, -1 if request.num_computed_tokens else None)

    def has_wrong_state(self, request_id: str, computed_tokens: int) -> bool:
        """Whether a session's recurrent state is not the one after its computed tokens."""
        session = self._sessions.get(request_id)
        return session is not None and session.state_tokens not in (None, computed_tokens)

    def is_corrupt(self, block_id: int) -> bool:
        """Whether a block is corrupt. A block with a new hash is not: another request has reused it."""
        return block_id in self._corrupt and self._corrupt[block_id] == self._hash(block_id)

    def correct_states(self, handed_over: Sequence[tuple[int, int, int]], metrics: ConnectorMetrics) -> list[State]:
        """The correct states among the handed-over states of one request. `metrics` counts the corrupt states."""
        states = [State(*state) for state in handed_over if not self.is_corrupt(state[1])]
        if len(states) < len(handed_over):
            metrics.store("recurrent", "dropped_wrong", len(handed_over) - len(states))
        return states

    def unmark_allocated(self, blocks: KVCacheBlocks) -> None:
        """Removes the marks of a request's blocks without a hash, when the engine has allocated them and before any
        load. These blocks are new: the engine finds blocks of its own hit by their hash. Another connector may load
        into them."""
        if self._corrupt:
            for group in blocks.blocks:
                for block in group:
                    if block.block_hash is None:
                        self._corrupt.pop(block.block_id, None)

    def _clear_from(self, table: Sequence[Sequence[int]], computed_tokens: int) -> None:
        for block_tokens, block_ids in zip(self._block_tokens, table, strict=True):
            for block_id in block_ids[-(-computed_tokens // block_tokens) :]:
                self._corrupt.pop(block_id, None)

    def follow_step(self, output: SchedulerOutput, tables: compat.BlockTables) -> None:
        """Records the corrupt blocks and misled requests of a step. Evicts misfiled states and uncomputed blocks from
        the engine's prefix cache. Must be called before the step's stores are planned."""
        self._uncomputed_blocks.follow_step(output, self._pool)
        for request_id in (*compat.preempted_ids(output), *compat.finished_ids(output)):
            # The request starts over, or has ended. Its corrupt blocks remain corrupt.
            self._misled.pop(request_id, None)
        sessions = self._sessions_in(output)
        copies = compat.block_copies(output)
        groups, checkpoints = self.suspects.with_misfiled_states, self.suspects.inner_checkpoints
        misfiled = misfiled_blocks(output, groups, checkpoints) if groups or checkpoints else ()
        if not copies and not misfiled and not self._corrupt and not sessions:
            return
        for request_id in self._misled.keys() & output.num_scheduled_tokens.keys():
            self._record(request_id, tables(request_id))
        for request_id, block_ids in compat.added_blocks(output).items():
            if request_id not in self._misled:
                for block_id in block_ids:
                    self._corrupt.pop(block_id, None)
        self._follow_copies(copies, compat.boundary_states(output))
        # In order of admission, because a request may hit blocks that an earlier request of this step computes.
        for request_id, computed_tokens in compat.admitted(output).items():
            self._admit(request_id, computed_tokens, tables(request_id), copies)
        for session, end in sessions:
            session.state_tokens = end
        # Misfiled blocks are marked last. Some may belong to a request that starts in this step: `_admit` would remove
        # their marks, or count the request as misled. The engine offers a cached state only from the next step on, so
        # no request has used these blocks yet.
        if misfiled and self._pool is not None:
            compat.evict_cached_blocks(self._pool, misfiled)
        for block_id in misfiled:
            self._add(block_id)

    def _sessions_in(self, output: SchedulerOutput) -> list[tuple[_Session, int]]:
        """The sessions in this step, each with the token at which the step ends. Forgets sessions that have ended, and
        the states of those that the engine starts over."""
        if not self._sessions:
            return []
        for request_id in compat.preempted_ids(output):
            if session := self._sessions.get(request_id):
                session.state_tokens = None
        for request_id in compat.finished_ids(output):
            session = self._sessions.get(request_id)
            if session is not None and session.request.is_finished():  # else a new session has taken the id
                del self._sessions[request_id]
        scheduled = self._sessions.keys() & output.num_scheduled_tokens.keys()
        if not scheduled:
            return []
        chunks, drafts = compat.computed_tokens(output), compat.draft_tokens(output)
        found = []
        for request_id in scheduled & chunks.keys():
            session = self._sessions[request_id]
            is_unknown = session.state_tokens == -1 or bool(drafts.get(request_id))
            found.append((session, -1 if is_unknown else chunks[request_id][1]))
        return found

    def _hash(self, block_id: int) -> Any:
        return None if self._pool is None else self._pool.blocks[block_id].block_hash

    def _add(self, block_id: int) -> None:
        if block_id != NULL_BLOCK:
            self._corrupt[block_id] = self._hash(block_id)

    def _follow_copies(
        self, copies: Sequence[tuple[int, int]], handed_over: Mapping[str, Sequence[tuple[int, int, int]]]
    ) -> None:
        """Marks copies of corrupt blocks, and partly copied blocks with a state that is handed over. Destinations are
        newly allocated, so earlier marks are removed."""
        destinations = {destination for _, destination in copies}
        for destination in destinations:
            self._corrupt.pop(destination, None)
        for source, destination in copies:
            if source in destinations or self.is_corrupt(source):
                self._add(destination)
        for states in handed_over.values():
            for group, block_id, _ in states:
                if group in self.suspects.partly_copied and block_id in destinations:
                    self._add(block_id)

    def _admit(
        self, request_id: str, computed_tokens: int, table: Sequence[Sequence[int]], copies: Sequence[tuple[int, int]]
    ) -> None:
        session = self._sessions.get(request_id)
        if request_id in self._misled and session is not None and session.state_tokens is not None:
            return  # the session continues; its blocks are already marked
        self._misled.pop(request_id, None)
        is_dropped = self.has_wrong_state(request_id, computed_tokens)
        cause = DROPPED_STEP if is_dropped else self._cause(computed_tokens, table, copies)
        if cause is None:
            self._clear_from(table, computed_tokens)
            return
        self._misled[request_id] = [computed_tokens // block_tokens for block_tokens in self._block_tokens]
        self._record(request_id, table)
        self._metrics.count_misled(cause)
        self._warn(request_id, cause)

    def _cause(
        self, computed_tokens: int, table: Sequence[Sequence[int]], copies: Sequence[tuple[int, int]]
    ) -> str | None:
        """Why a block of a request's computed tokens is corrupt, as a label of the metric. None if no such block is
        corrupt."""
        sources = {destination: source for source, destination in copies}
        cause = None
        for group, (block_tokens, block_ids) in enumerate(zip(self._block_tokens, table, strict=True)):
            for block_id in block_ids[: -(-computed_tokens // block_tokens)]:
                source = sources.get(block_id)
                if source in sources:
                    return "copied_copy"
                if self.is_corrupt(block_id) or (source is not None and self.is_corrupt(source)):
                    cause = "wrong_block"
                elif source is not None and group in self.suspects.partly_copied:
                    cause = cause or "partial_copy"
        return cause

    def _record(self, request_id: str, table: Sequence[Sequence[int]]) -> None:
        """Marks all blocks that a misled request computes, as soon as the engine has allocated them."""
        first = self._misled[request_id]
        for group, block_ids in enumerate(table):
            are_hashes_final = True
            for place in range(first[group], len(block_ids)):
                self._add(block_ids[place])
                are_hashes_final = are_hashes_final and self._has_final_hash(group, block_ids[place])
                if are_hashes_final:
                    first[group] = place + 1

    def _has_final_hash(self, group: int, block_id: int) -> bool:
        """Whether a block has its final hash. The hash of a partial block is replaced when the block is full."""
        if block_id == NULL_BLOCK:
            return True
        block = None if self._pool is None else self._pool.blocks[block_id]
        num_tokens = getattr(block, "block_hash_num_tokens", None)
        return num_tokens is not None and num_tokens % self._block_tokens[group] == 0

    def _warn(self, request_id: str, cause: str) -> None:
        is_session = cause == DROPPED_STEP
        if is_session in self._warned:
            return
        self._warned.add(is_session)
        if is_session:
            logger.warning(
                "session %s continues from a recurrent state that may contain a token that vLLM has dropped: a bug of "
                "this version of vLLM. Its answer may be wrong, and nothing that it computes is stored or sent to "
                "peers. Start with --no-async-scheduling and without a drafter, or use a fixed vLLM. This is logged "
                "once; vllm:hybridkv_misled_requests_total counts all such sessions",
                printable(request_id),
            )
            return
        logger.warning(
            "request %s continues from a corrupt block (%s) of this version of vLLM. Its answer may be wrong, and "
            "nothing that it computes is stored or sent to peers. Unset prefix_match_unit if it is set, or use a fixed "
            "vLLM. This is logged once; vllm:hybridkv_misled_requests_total counts all such requests",
            printable(request_id),
            cause,
        )
