"""The records of a disk tier as a ledger knows them: each has an address in a segment, and a time of its last use.

Changes segments' counts along with a record's life, and tells a log what changed. Knows no file, and does not decide
where a record goes or when one is evicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.tiers.disk.tables.plain_records import PlainRecordTable

why_not_native = ""

if TYPE_CHECKING:

    class RecordTable(PlainRecordTable):
        """What follows, whichever it is: both have these members."""

else:
    try:
        from hybridkv.tiers.disk.tables.native_records import NativeRecordTable as _Base
    except ImportError as error:  # also where it is there, and older than this library
        _Base = PlainRecordTable
        why_not_native = f", since hybridkv.native cannot be imported ({error})"

    class RecordTable(_Base):
        """All records of a namespace: what a `TierIndex` promises of keys, and for those who look after files:

        `find`: what is known of a key, as it is now; `reserved`: what is being written,
        `in_use`: that, and what is pinned; `movable_in`: of a segment what
        is committed and not pinned, in the order in which it lies; `why_not`, `count_refusal`, `make_room` and
        `reserve`: the steps of a reservation, between which somebody sees to room in segments; `evict`, `evict_next`
        and `has_evictable`; `withdraw` and `withdraw_in`: `invalidate`, and what was withdrawn; `relocate`: a record
        that is committed and not pinned lies elsewhere now; `drop_segment`: one that is there no more; `forget_all`;
        `close`: reserve nothing more; `source`: for a snapshot; `restore`: what an opening found.
        """
