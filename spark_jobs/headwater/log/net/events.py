"""What a batch does to the keys of one table, event after event."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.log.blocks import UPDATE
from headwater.log.net.codes import key_codes
from headwater.log.net.decoded import DecodedChanges
from headwater.log.values.wire import fixed
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

REMOVE, PUT_OVER_STORED, PUT_NEW = 0, 1, 2


@dataclass(slots=True)
class Events:
    """What happens to keys, in order: `code` numbers the key, `row` the new row (-1: removal).

    `order` is twice the change's sequence, plus one for a put, so that an update's removal comes before its put.
    `came_from`: for the put of an update that changed the key, the code of the old key; else -1.
    """

    order: Int64
    code: Int64
    kind: npt.NDArray[np.int8]
    row: Int64
    came_from: Int64
    key_row: Int64
    """Per code a row that has its key: of the new rows, and behind them the old tuples."""
    row_code: Int64
    """Per new row its key's code."""

    @property
    def codes(self) -> int:
        return len(self.key_row)

    @classmethod
    def of(cls, schema: TableSchema, decoded: DecodedChanges) -> Events:
        new_codes, old_codes, count = key_codes(decoded.rows.select(list(schema.key)), decoded.old_keys)
        key_row = np.zeros(count, dtype=np.int64)
        key_row[old_codes] = np.arange(len(old_codes)) + len(new_codes)
        key_row[new_codes] = np.arange(len(new_codes))
        put, update = decoded.new >= 0, decoded.operation == UPDATE
        code = new_codes[decoded.new] if put.all() else _chosen(put, new_codes, decoded.new, old_codes, decoded.old)
        moved = update & (decoded.old >= 0)
        came_from = np.full(len(code), -1, dtype=np.int64)
        if moved.any():
            came_from[moved] = old_codes[decoded.old[moved]]
            moved &= came_from != code
            came_from[~moved] = -1
        kind = np.where(put, np.where(update & ~moved, PUT_OVER_STORED, PUT_NEW), REMOVE).astype(np.int8)
        events = cls(decoded.sequence * 2 + put, code, kind, decoded.new, came_from, key_row, new_codes)
        return events.with_removals(decoded.sequence[moved] * 2, came_from[moved]) if moved.any() else events

    def with_removals(self, order: Int64, code: Int64) -> Events:
        """Further events, of keys that go."""
        nothing = np.full(len(code), -1, dtype=np.int64)
        return replace(
            self,
            order=np.concatenate([self.order, order]),
            code=np.concatenate([self.code, code]),
            kind=np.concatenate([self.kind, np.full(len(code), REMOVE, dtype=np.int8)]),
            row=np.concatenate([self.row, nothing]),
            came_from=np.concatenate([self.came_from, nothing]),
        )._sorted()

    def _sorted(self) -> Events:
        by = np.argsort(self.order, kind="stable")
        return replace(
            self,
            order=self.order[by],
            code=self.code[by],
            kind=self.kind[by],
            row=self.row[by],
            came_from=self.came_from[by],
        )

    def last(self) -> Int64:
        """Per code the index of its last event, -1 for codes without one."""
        result = np.full(self.codes, -1, dtype=np.int64)
        result[self.code] = np.arange(len(self.code))
        return result

    def first(self) -> Int64:
        result = np.full(self.codes, -1, dtype=np.int64)
        result[self.code[::-1]] = np.arange(len(self.code))[::-1]
        return result

    def previous_of_same_code(self) -> Int64:
        """Per event the one before it of the same key, -1 for the first."""
        by = np.argsort(self.code, kind="stable")
        previous = np.full(len(self.code), -1, dtype=np.int64)
        same = self.code[by][1:] == self.code[by][:-1]
        previous[by[1:][same]] = by[:-1][same]
        return previous

    def with_leaves_emptied(self, sequence: int, relation_ids: tuple[int, ...], decoded: DecodedChanges) -> Events:
        """Truncating leaves removes the keys whose row, at that moment, was put there earlier in the batch."""
        before = self.order < sequence * 2
        last = np.full(self.codes, -1, dtype=np.int64)
        last[self.code[before]] = np.flatnonzero(before)
        alive = last[last >= 0]
        alive = alive[self.row[alive] >= 0]
        leaf = np.zeros(decoded.rows.num_rows, dtype=np.int64)
        puts = decoded.new >= 0
        leaf[decoded.new[puts]] = decoded.relation[puts]
        gone = self.code[alive[np.isin(leaf[self.row[alive]], relation_ids)]]
        return self.with_removals(np.full(len(gone), sequence * 2, dtype=np.int64), gone)


def _chosen(put: Bool, new_codes: Int64, new: Int64, old_codes: Int64, old: Int64) -> Int64:
    """Per change the code of its new key, or of the old one where nothing is put."""
    codes = np.empty(len(put), dtype=np.int64)
    codes[put], codes[~put] = new_codes[new[put]], old_codes[old[~put]]
    return codes


def keys_of(decoded: DecodedChanges, events: Events, codes: Int64, keys: list[str]) -> pa.Table:
    """The key columns behind `codes`; null for -1. Any event of a code may lend its key: a new row or an old tuple."""
    both = pa.concat_tables([decoded.rows.select(keys), decoded.old_keys.select(keys)])
    if not len(codes):
        return both.schema.empty_table()
    return both.take(fixed(pa.int64(), events.key_row[codes], codes >= 0))
