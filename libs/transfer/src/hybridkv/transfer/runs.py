"""Runs of bytes, the input of copy engines: addresses and sizes, without blocks, groups, layers or tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

try:
    from hybridkv.native import Lowering, MemoryCopier, expand_rows
except ImportError as error:
    raise ImportError(
        f"hybridkv.transfer needs hybridkv-native>=0.1,<0.2, which cannot be imported ({error}); "
        "hint: pip install 'hybridkv-native>=0.1,<0.2'"
    ) from error

__all__ = ["CopyEngineError", "CopyRuns", "Extent", "Lowering", "MemoryCopier", "RunsError", "TransferError"]


class TransferError(Exception):
    """Base of the errors of `hybridkv.transfer`."""


class RunsError(TransferError, ValueError):
    """Invalid arrays: types or lengths differ, sizes are not positive, or addresses are negative."""


class CopyEngineError(TransferError, RuntimeError):
    """Wrong use of a copy engine: after `close`, with a job id in use, or with invalid memory."""


Integers: TypeAlias = npt.NDArray[np.int64]

Extent: TypeAlias = tuple[int, int]
"""(address, num_bytes)"""


ROW_WORDS = 6
"""64-bit words of a row: source, destination, step of the source and step of the destination from run to run, bytes of
a run, number of runs."""


class AddressSpans(NamedTuple):
    """Address range [begin, end) of all sources, and address range of all destinations."""

    source_begin: int
    source_end: int
    destination_begin: int
    destination_end: int


class CopyRuns:
    """Runs: `num_bytes[i]` bytes from address `sources[i]` to address `destinations[i]`, for each i in order.

    Immutable. The three int64 arrays have one length. They become read-only and belong to this object.
    `RunsError` if a size is not positive or an address is negative. A destination must not overlap another destination
    or any source: the result would depend on the order, and copy engines may change the order. This is not checked.

    Runs from a `Lowering` are kept as rows. They are expanded to arrays only if a caller reads the arrays.
    """

    __slots__ = ("_columns", "_num_runs", "_rows", "_spans", "_total_bytes")

    def __init__(self, sources: Integers, destinations: Integers, num_bytes: Integers) -> None:
        columns = {"sources": sources, "destinations": destinations, "num_bytes": num_bytes}
        for name, array in columns.items():
            if array.dtype != np.int64 or array.ndim != 1 or len(array) != len(sources):
                expected = f"a one-dimensional int64 array of length {len(sources)}"
                raise RunsError(f"{name}: expected {expected}, got {array.dtype}{list(array.shape)}")
            array.setflags(write=False)
        if len(num_bytes) and int(num_bytes.min()) <= 0:
            raise RunsError(f"num_bytes: expected sizes > 0, got {int(num_bytes.min())}")
        for name in ("sources", "destinations"):
            array = columns[name]
            if len(array) and int(array.min()) < 0:
                raise RunsError(f"{name}: expected addresses >= 0, got {int(array.min())}")
        self._columns: tuple[Integers, Integers, Integers] | None = (sources, destinations, num_bytes)
        self._num_runs = len(num_bytes)
        self._rows: Integers | None = None
        self._spans: AddressSpans | None = None
        self._total_bytes: int | None = None

    @classmethod
    def of_rows(cls, rows: Integers, num_runs: int, total_bytes: int, spans: tuple[int, int, int, int]) -> CopyRuns:
        """Runs from the result of `Lowering.lower`. Does not check them again."""
        made = cls.__new__(cls)
        made._columns = None
        made._num_runs = num_runs
        made._rows = rows
        made._spans = AddressSpans(*spans)
        made._total_bytes = total_bytes
        return made

    @property
    def sources(self) -> Integers:
        return self._arrays()[0]

    @property
    def destinations(self) -> Integers:
        return self._arrays()[1]

    @property
    def num_bytes(self) -> Integers:
        return self._arrays()[2]

    @property
    def rows(self) -> Integers:
        """The runs as rows of `ROW_WORDS` words, one after the other."""
        if self._rows is None:
            rows = np.zeros((len(self), ROW_WORDS), dtype=np.int64)
            rows[:, 0], rows[:, 1], rows[:, 4], rows[:, 5] = *self._arrays(), 1
            self._rows = rows.reshape(-1)
        return self._rows

    @property
    def spans(self) -> AddressSpans:
        """Spans of all addresses. Exact if the runs come from a `Lowering`; otherwise the ends may be too large."""
        if self._spans is None:
            sources, destinations, num_bytes = self._arrays()
            spans: list[int] = []
            for addresses in (sources, destinations):
                # An upper bound of the highest end: `addresses + num_bytes` could overflow.
                highest = int(addresses.max()) + int(num_bytes.max()) if len(self) else 0
                spans += [int(addresses.min()) if len(self) else 0, highest]
            self._spans = AddressSpans(*spans)
        return self._spans

    @property
    def row_table(self) -> Integers | None:
        """Rows, as an array of `ROW_WORDS` columns. None for runs from arrays, until `rows` is read."""
        return None if self._rows is None else self._rows.reshape(-1, ROW_WORDS)

    def fill(self, sources: Integers, destinations: Integers, num_bytes: Integers) -> None:
        """Write the runs to arrays of length `len(self)`."""
        if self._columns is None and self._rows is not None:
            expand_rows(self._rows, sources, destinations, num_bytes)
            return
        for array, column in zip((sources, destinations, num_bytes), self._arrays(), strict=True):
            np.copyto(array, column)

    def _arrays(self) -> tuple[Integers, Integers, Integers]:
        if self._columns is None:
            sources, destinations, num_bytes = (np.empty(self._num_runs, dtype=np.int64) for _ in range(3))
            self.fill(sources, destinations, num_bytes)
            for array in (sources, destinations, num_bytes):
                array.setflags(write=False)
            self._columns = sources, destinations, num_bytes
        return self._columns

    @classmethod
    def empty(cls) -> CopyRuns:
        return cls.of([])

    @classmethod
    def of(cls, triples: Iterable[tuple[int, int, int]]) -> CopyRuns:
        """Runs from (source, destination, num_bytes)."""
        table = np.array(list(triples), dtype=np.int64).reshape(-1, 3)
        return cls(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())

    def __len__(self) -> int:
        return self._num_runs

    @property
    def total_bytes(self) -> int:
        if self._total_bytes is None:
            self._total_bytes = int(self.num_bytes.sum())
        return self._total_bytes

    def triples(self) -> list[tuple[int, int, int]]:
        """(source, destination, num_bytes) as Python integers."""
        return list(zip(self.sources.tolist(), self.destinations.tolist(), self.num_bytes.tolist(), strict=True))

    def reversed(self) -> CopyRuns:
        """Runs in the opposite direction, from each destination to its source."""
        return CopyRuns(self.destinations, self.sources, self.num_bytes)

    def select(self, which: npt.NDArray[np.bool_]) -> CopyRuns:
        """Runs at the true positions of a mask."""
        if which.all():
            return self
        if not which.any():
            return CopyRuns.empty()
        return CopyRuns(self.sources[which], self.destinations[which], self.num_bytes[which])

    def cut_at_multiples(self, num_bytes: int) -> CopyRuns:
        """The same bytes, cut at each source or destination address that is a multiple of `num_bytes`."""
        if not len(self):
            return self
        spans = self.spans
        sides = []
        if spans.source_begin // num_bytes != (spans.source_end - 1) // num_bytes:
            sides.append(self.sources)
        if spans.destination_begin // num_bytes != (spans.destination_end - 1) // num_bytes:
            sides.append(self.destinations)
        if not sides:  # the usual case: no multiple lies between the lowest and the highest address
            return self
        begins = np.cumsum(self.num_bytes) - self.num_bytes
        cuts: list[int] = []
        for addresses in sides:
            offsets = addresses % num_bytes
            for run in np.flatnonzero(offsets + self.num_bytes > num_bytes).tolist():
                into_run = range(num_bytes - int(offsets[run]), int(self.num_bytes[run]), num_bytes)
                cuts += [int(begins[run]) + position for position in into_run]
        return self._cut_at(np.array(cuts, dtype=np.int64)) if cuts else self

    def _cut_at(self, positions: Integers) -> CopyRuns:
        """Cut runs at these byte positions, counted over all runs. Each position is below the total."""
        ends = np.cumsum(self.num_bytes)
        bounds = np.union1d(np.concatenate(([0], ends)), positions)
        run = np.searchsorted(ends, bounds[:-1], side="right")
        into_run = bounds[:-1] - (ends - self.num_bytes)[run]
        return CopyRuns(self.sources[run] + into_run, self.destinations[run] + into_run, np.diff(bounds))
