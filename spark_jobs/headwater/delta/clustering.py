"""How the rows of a table with `cluster_by` lie in its files: along a curve through these columns, so that a query by
their values reads few files.

Files that were written together are a run: its rows are in one order, so of each run few files hold a value, and a
query reads as many files as there are runs, more or less. A run's name is part of its files' names, where no writer,
checkpoint or engine loses it. Delta knows the columns as well, so its own OPTIMIZE keeps to them.

Source: Delta transaction protocol, "Clustered Table" and "Domain Metadata"; G. M. Morton's order of 1966, over
quantiles.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.delta.delta_log import Snapshot
from headwater.delta.layout import Layout
from headwater.delta.log_entries import Action

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

DOMAIN: Final = "delta.clustering"
FEATURES: Final = ("clustering", "domainMetadata")
SAMPLED_ROWS: Final = 100_000
"""So many are enough to know how values are distributed."""

_CODE_BITS: Final = 48
_MOST_BITS: Final = 16
_TEXT_BYTES: Final = 32
"""Of a text; file statistics hold no more of it."""
_SLICE: Final = 64 * 1024
_RUN = re.compile(r"(?:\A|/)run-([0-9a-f]{32})-[^/]*\Z")


def new_run() -> str:
    """The name of a run to be written."""
    return uuid.uuid4().hex


def run_of(name: str) -> str:
    """The run that the file `name` was written in; empty for one that stands for itself."""
    found = _RUN.search(name)
    return found[1] if found is not None else ""


def clustered_by(snapshot: Snapshot) -> tuple[str, ...]:
    """The columns that the table says it is clustered by, by their names in files."""
    found = snapshot.domains.get(DOMAIN)
    columns = json.loads(found["configuration"])["clusteringColumns"] if found is not None else []
    return tuple(path[0] for path in columns)


def domain(columns: Iterable[str], layout: Layout) -> Action:
    """What a table says that is clustered by `columns`; without columns: that it is not any more. It is not removed:
    Delta wants one of every table that has the feature."""
    paths = [[layout.in_files(name)] for name in columns]
    configuration = json.dumps({"clusteringColumns": paths, "domainName": DOMAIN}, separators=(",", ":"))
    return {"domainMetadata": {"domain": DOMAIN, "configuration": configuration, "removed": False}}


def change(snapshot: Snapshot, columns: Sequence[str], layout: Layout, protocol: Action | None = None) -> list[Action]:
    """The actions after which the table is clustered by `columns`; none where it is. `protocol`: the one that the same
    commit brings already."""
    if tuple(map(layout.in_files, columns)) == clustered_by(snapshot):
        return []
    known = protocol or snapshot.protocol
    writing = {*(known.get("writerFeatures") or ())}
    wanted = {**known, "writerFeatures": sorted({*writing, *FEATURES})}
    return [*([{"protocol": wanted}] if not writing.issuperset(FEATURES) else []), domain(columns, layout)]


@dataclass(frozen=True)
class Curve:
    """Leads from the values of `columns` to a place: rows that are near each other in all of them have near places.

    `bounds`: of each column the values between its quantiles, as sorted words.
    """

    columns: tuple[str, ...]
    bounds: tuple[npt.NDArray[Any], ...]
    bits: int

    @classmethod
    def of(cls, rows: pa.Table, columns: Sequence[str]) -> Curve:
        """The curve through values like those of `rows`, a sample of at most some hundred thousand."""
        bits = min(_MOST_BITS, _CODE_BITS // len(columns))
        return cls(tuple(columns), tuple(_quantiles(_words(rows[name]), 1 << bits) for name in columns), bits)

    def places(self, rows: pa.Table) -> UInt64:
        """Of each row, within 48 bits. NULL is the least of all values."""
        # Over all the bits: else a column of few values would decide nothing.
        ranks = [
            (np.searchsorted(bounds, _words(rows[name]), side="right").astype(np.uint64) << np.uint64(self.bits))
            // np.uint64(len(bounds) + 1)
            for name, bounds in zip(self.columns, self.bounds, strict=True)
        ]
        if len(ranks) == 1:
            return ranks[0]
        found = np.zeros(rows.num_rows, dtype=np.uint64)
        for bit in range(self.bits):
            for index, rank in enumerate(ranks):
                at = bit * len(ranks) + len(ranks) - 1 - index  # the first column has the higher bit
                found |= ((rank >> np.uint64(bit)) & np.uint64(1)) << np.uint64(at)
        return found


def in_order(rows: pa.Table, columns: Sequence[str]) -> Int64:
    """The numbers of `rows` along the curve; rows at one place in the order of the columns. `rows` may hold these
    columns alone."""
    keys: list[tuple[str, str]] = [(name, "ascending") for name in columns]
    sorted_by = rows.select(list(columns))
    if len(columns) > 1:
        step = max(1, rows.num_rows // SAMPLED_ROWS)
        sample = sorted_by.take(pa.array(np.arange(0, rows.num_rows, step)))
        # No column is called like this: the prefix is reserved.
        sorted_by = sorted_by.append_column("_hw_place", pa.array(Curve.of(sample, columns).places(sorted_by)))
        keys.insert(0, ("_hw_place", "ascending"))
    found = pc.sort_indices(sorted_by, sort_keys=keys)
    order: Int64 = found.to_numpy().astype(np.int64)
    return order


def ordered(batches: Iterable[pa.Table], columns: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of `batches` in their order; all of them are held."""
    parts = list(batches)
    if not parts:
        return
    rows = pa.concat_tables(parts)
    order = in_order(rows, columns)
    for first in range(0, len(order), _SLICE):
        yield rows.take(pa.array(order[first : first + _SLICE]))


def _quantiles(words: npt.NDArray[Any], parts: int) -> npt.NDArray[Any]:
    """At most `parts` - 1 values that divide these into parts of about the same size."""
    if not len(words):
        return words
    ordered_words = np.sort(words)
    at = np.arange(1, parts) * len(words) // parts
    return np.unique(ordered_words[at])


def _words(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[Any]:
    """The values as what numpy compares natively, in the order of the statistics."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        short = pc.binary_slice(pc.fill_null(column, "").cast(pa.large_binary()), 0, _TEXT_BYTES)
        return np.array(short.to_numpy(zero_copy_only=False), dtype=f"S{_TEXT_BYTES}")
    if pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    found: npt.NDArray[Any] = pc.fill_null(column.cast(pa.int64()), np.iinfo(np.int64).min).to_numpy()
    return found
