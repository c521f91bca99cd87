"""What applying a plan finds on its way, part by part: rows to delete, and rows that contradict the lake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.apply.live_table import LiveTable
from headwater.delta.index.codes import Codes
from headwater.delta.index.written_keys import WrittenKeys

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

EXAMPLES = 3
UPDATE_MISSED, INSERT_MET, DELETE_MISSED = "update met no row", "insert met a row", "delete met no row"


@dataclass(slots=True)
class Work:
    """What is to be committed beside the new rows, as it is found part by part: `deleted` rows by file, `gone` of them
    by this plan, or `everything`; `written`: keys of the new rows, where a look-up will want them."""

    everything: bool
    deleted: dict[str, BitMap] = field(default_factory=dict)
    gone: int = 0
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
        self.gone += len(places)
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
