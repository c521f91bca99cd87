"""Finding the rows that a plan is about: where they stand by their keys, and which of them contradict the log. `Work`
gathers over the parts of a plan what its commit says of stored rows.

To the log a row that is marked as deleted is not there, and neither is one in a leaf that was emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.apply.live_table import LiveTable
from headwater.apply.soft_delete import are_marked, end_deleted
from headwater.delta.index.codes import Codes, encode
from headwater.delta.index.index import NOWHERE
from headwater.delta.index.written_keys import WrittenKeys
from headwater.net_changes import NetChanges
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

EXAMPLES = 3
UPDATE_MISSED, INSERT_MET, DELETE_MISSED = "update met no row", "insert met a row", "delete met no row"
_NOTHING: Int64 = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Found:
    """Where the rows of one part stand: `puts` per new row, `goes` per removed key, NOWHERE without one. The masks say
    which new rows, and which removed keys, contradict the log."""

    puts: Int64
    goes: Int64
    update_missed: Bool
    insert_met: Bool
    delete_missed: Bool

    @property
    def divergence(self) -> int:
        return int(self.update_missed.sum() + self.insert_met.sum() + self.delete_missed.sum())

    def examples(self, changes: NetChanges, keys: list[str]) -> list[str]:
        deleted = end_deleted(changes)
        missed = (
            (UPDATE_MISSED, changes.rows, self.update_missed & ~deleted),
            (INSERT_MET, changes.rows, self.insert_met),
            (DELETE_MISSED, changes.removed, self.delete_missed),
            (DELETE_MISSED, changes.rows, self.update_missed & deleted),
        )
        return [text for word, table, mask in missed for text in examples(word, table.select(keys), mask)]


def find_rows(
    state: LiveTable, schema: TableSchema, changes: NetChanges, codes: Codes | None, emptied: Mapping[str, BitMap]
) -> Found:
    """`codes`: of the new rows' keys; None: the table has no key. `emptied`: by file, rows that go without being named:
    what a new row meets there is one of them."""
    count = changes.rows.num_rows
    puts = state.find(codes) if codes is not None else np.full(count, NOWHERE, dtype=np.int64)
    goes = state.find(encode(schema, changes.removed)) if changes.removed.num_rows else _NOTHING
    lives = (puts != NOWHERE) & ~are_marked(state, schema, puts)
    insert_met = ~changes.stored & lives & ~state.are_among(puts, emptied)
    return Found(puts, goes, changes.stored & ~lives, insert_met, goes == NOWHERE)


def find_stored(state: LiveTable, schema: TableSchema, changes: NetChanges) -> Found:
    """Where all rows are written anew: only those count that must be stored already."""
    puts = state.find(encode(schema, changes.rows.select(list(schema.key))))
    missed = changes.stored & ((puts == NOWHERE) | are_marked(state, schema, puts))
    nothing = np.zeros(0, dtype=np.bool_)
    return Found(puts, _NOTHING, missed, nothing, nothing)


@dataclass(slots=True)
class Work:
    """What is to be committed beside the new rows, as it is found part by part: `deleted` rows by file, or
    `everything`; `written`: keys of the new rows, where a look-up will want them."""

    everything: bool
    deleted: dict[str, BitMap] = field(default_factory=dict)
    written: WrittenKeys | None = None
    divergence: int = 0
    shown: list[str] = field(default_factory=list)
    proofs: list[str] = field(default_factory=list)
    """Why each part only adds rows; empty where it was not proved."""

    @property
    def append_because(self) -> str:
        """Why all of it only adds rows; empty where it was not proved."""
        return "; ".join(dict.fromkeys(self.proofs)) if self.proofs and all(self.proofs) else ""

    def proved(self, because: str) -> None:
        self.proofs.append(because)

    def wrote(self, codes: Codes | None) -> None:
        """Rows under these keys are written next."""
        if self.written is not None and codes is not None:
            self.written.add(codes)

    def empty(self, state: LiveTable, rows: dict[str, BitMap]) -> None:
        """All of these rows go, by file."""
        nowhere: Int64 = np.zeros(0, dtype=np.int64)
        for name, some in state.deletions(nowhere, rows).items():
            self.deleted[name] = self.deleted.get(name, some) | some

    def delete(self, state: LiveTable, places: Int64) -> None:
        for name, rows in state.deletions(places).items():
            self.deleted[name] = self.deleted.get(name, rows) | rows

    def diverged(self, count: int, shown: Callable[[], list[str]]) -> None:
        """`count` more rows contradict the lake; the first ones of all are shown."""
        self.divergence += count
        if count and len(self.shown) < EXAMPLES:
            self.shown += shown()

    @property
    def example(self) -> str:
        return "; ".join(self.shown[:EXAMPLES])


def examples(word: str, keys: pa.Table, which: Bool) -> list[str]:
    """A few of these keys, as a divergence names them."""
    rows = keys.take(pa.array(np.flatnonzero(which)[:EXAMPLES])).to_pylist()
    return [f"{word} at key ({', '.join(str(value) for value in row.values())})" for row in rows]
