"""Large address range over little memory: one small file, mapped many times in a row."""

from __future__ import annotations

import ctypes
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

PIECE_BYTES = 16 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


class LargeMemory:
    """The same 16 MiB `num_pieces` times in a row. The first bytes are `piece`, which is writable."""

    def __init__(self, num_pieces: int) -> None:
        self.num_bytes = num_pieces * PIECE_BYTES
        file = os.memfd_create("large")
        try:
            os.ftruncate(file, PIECE_BYTES)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self.address = self._map(None, self.num_bytes, mmap.PROT_READ, flags, -1)
            for at in range(num_pieces):
                place = self.address + at * PIECE_BYTES
                self._map(place, PIECE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, file)
        finally:
            os.close(file)
        self.piece = memoryview((ctypes.c_char * PIECE_BYTES).from_address(self.address)).cast("B")

    def close(self) -> None:
        self.piece.release()
        _libc.munmap(self.address, self.num_bytes)

    @staticmethod
    def _map(address: int | None, num_bytes: int, protection: int, flags: int, file: int) -> int:
        place = _libc.mmap(address, num_bytes, protection, flags, file, 0)
        if place in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        return int(place)
