"""Makes an engine lose cached blocks that it could have used: blocks with a hash and without a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oracle.mixes import Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from oracle.engine import OracleEngine


def lose(engine: OracleEngine, is_lost: Callable[[int, int], bool]) -> None:
    """As if the engine had given out unused blocks: those with a hash, chosen by group and block."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    lost = set()
    for block in pool.blocks:
        if block.ref_cnt == 0 and block.block_hash is not None:
            group = int.from_bytes(block.block_hash[-4:], "big")
            if is_lost(group, block.block_id):
                lost.add(block.block_id)
    pool.evict_blocks(lost)
    for runner in engine.runners:
        runner.memory.poison(sorted(lost))


def losing(random: Random) -> Callable[[OracleEngine, int], None]:
    """A hook that takes states, and sometimes attention, from the engine before a step."""

    def before_step(engine: OracleEngine, step: int) -> None:
        scarce = Kind.RECURRENT if engine.mix.has_recurrent else Kind.WINDOW
        if random.random() < 0.4:
            lose(engine, lambda group, _: engine.mix.groups[group].kind is scarce and random.random() < 0.8)
        if random.random() < 0.1:
            lose(engine, lambda group, _: random.random() < 0.2)

    return before_step
