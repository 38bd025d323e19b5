"""Writes down which epoch the namespace is in."""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.tiers.disk.files.names import EPOCH_NAME
from hybridkv.tiers.disk.format import epoch as epoch_file
from hybridkv.tiers.disk.tables.segments import Stage
from hybridkv.tiers.disk.upkeep.chore import Chore, Ending, Files
from hybridkv.tiers.disk.upkeep.kind import AnyPiece, Kind, Piece


@dataclass(frozen=True, slots=True)
class WriteEpoch(Chore[None]):
    epoch: int

    def run(self, files: Files) -> None:
        data = epoch_file.encode(self.epoch, files.namespace.digest)
        files.namespace.directory.write_file(EPOCH_NAME, data, sync=True)


class EpochWriter(Kind[WriteEpoch, None]):
    """Nothing that names an epoch is written before it has."""

    def plan(self) -> AnyPiece | None:
        return None if self._state.is_epoch_written else Piece(self, WriteEpoch(self._state.epoch))

    def begin_next(self) -> None:
        """Nothing that is on disk now may be offered again. Not true after a crash before that is written."""
        state, segments = self._state, self._state.segments
        state.epoch = epoch_file.after(state.epoch)
        state.is_epoch_written = False
        segments.close_open()
        while segments.ready:
            segment = segments.ready.popleft()
            segment.stage = Stage.FULL
            segments.refile(segment)
        state.records.log.give_up()
        state.is_snapshot_owed = True

    def apply(self, chore: WriteEpoch, ending: Ending[None]) -> None:
        state = self._state
        state.is_epoch_written = state.is_epoch_written or (ending.is_done and chore.epoch == state.epoch)
