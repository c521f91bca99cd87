"""The rows that a reload has read at the source, brought forward by what was committed since, as what is to stand in
their part of the table.

The rows lie as Parquet files in a folder of the reload's own, or in files of the table that wait for their commit
(`headwater.apply.waiting_files`) and cannot be made ready. They are read batch by batch when the part is written,
without those that the kept changes replace or remove; behind them come the rows that these put. A large value that the
log does not carry is taken from the row that was read; until its change is written it waits on local disk. So no key is
in two parts, and memory holds numbers for the keys of the kept changes, and a batch of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import join
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.apply.unchanged_values import Keep, ReadValues
from headwater.apply.waiting_files import waiting_files
from headwater.arrow_types import key_schema, lake_schema
from headwater.delta import storage
from headwater.delta.index.codes import encode
from headwater.delta.index.index import NOWHERE, KeyIndex, KeySet, place_of
from headwater.delta.where_files import matches
from headwater.errors import Diverged
from headwater.lake.paths import reloaded_path
from headwater.names import TableName
from headwater.net_changes import NetChanges
from headwater.predicate import Predicate
from headwater.schema import PARTITION_COLUMN, TableSchema

Bool = npt.NDArray[np.bool_]

_ROWS = 50_000
_BYTES = 64 << 20
"""Of rows that are in memory at a time."""
_KEYS = "keys.arrow"


Read = Callable[[], Iterator[pa.Table]]
Scratch = Callable[[pa.Table], str]
"""Writes rows to a private Parquet file of the local disk; its path. Whoever asks for it removes it."""


def row_files(root: str, name: str) -> list[str]:
    """The Parquet files of the reload `name`."""
    folder = reloaded_path(root, name)
    return [join(folder, file) for file in sorted(storage.names(folder)) if file.endswith(".parquet")]


def rows_in(files: Sequence[str]) -> list[tuple[int, int]]:
    """Rows and bytes of each."""
    found = []
    for file in files:
        with storage.parquet_file(file) as parquet:
            found.append((parquet.metadata.num_rows, storage.info(file).size))
    return found


def size_read(root: str, name: str) -> tuple[int, int]:
    """Rows and bytes that the reload `name` has read."""
    waiting = waiting_files(root, name)
    if waiting is not None:
        return waiting.rows, waiting.size
    found = rows_in(row_files(root, name))
    return sum(rows for rows, _ in found), sum(size for _, size in found)


def remove_rows(root: str, name: str) -> None:
    storage.delete_folder(reloaded_path(root, name))


def rows_read(schema: TableSchema, files: Sequence[str]) -> Iterator[pa.Table]:
    """The rows in these files of a reload's folder, in parts."""
    kind = lake_schema(schema)
    for file in files:
        with storage.parquet_file(file) as parquet:
            for batch in parquet.iter_batches(batch_size=_at_a_time(parquet.metadata), columns=kind.names):
                yield pa.Table.from_batches([batch]).select(kind.names).cast(kind)


def part_of(
    schema: TableSchema,
    read: Read,
    leaves: tuple[int, ...],
    where: Predicate | None,
    since: NetChanges | None,
    scratch: Scratch,
    keep: Keep,
) -> NetChanges:
    """The content of the part as a net effect on the table: the partitions `leaves`, or the rows of `where` (neither:
    the whole table), are emptied, and these rows are put.

    `read`: goes through the rows anew at each call. `since`: the net effect that they do not hold yet, of the
    partitions' changes, else of all that the table stands at. `scratch`: where Spark finds rows; `keep`: where values
    wait.
    """
    rows = _Rows(schema, read, leaves, since, scratch, keep, where=where)
    return replace(rows.frame, on_disk=rows)


def write_keys(root: str, name: str, keys: pa.Table, rows: pa.Table) -> None:
    """What the reload `name` has found under certain `keys`: these `rows`, and none under the others."""
    folder = reloaded_path(root, name)
    storage.make_folder(folder, mode=0o700)
    with storage.parquet_writer(join(folder, "rows.parquet"), rows.schema) as writer:
        writer.write_table(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, keys.schema) as file:
        file.write_table(keys)
    storage.replace(join(folder, _KEYS), sink.getvalue().to_pybytes())


def under_keys(schema: TableSchema, root: str, name: str, since: NetChanges | None, keep: Keep) -> NetChanges:
    """The rows under the keys of the reload `name`, brought forward by the changes `since`, as a net effect: what is
    there is put, whatever stood there, and the other keys are removed."""
    keys = pa.ipc.open_file(storage.read(join(reloaded_path(root, name), _KEYS))).read_all().cast(key_schema(schema))
    asked = KeySet(schema, keys)
    tables = [lake_schema(schema).empty_table()]
    read = partial(rows_read, schema, row_files(root, name))
    for part in _Rows(schema, read, (), since, str, keep, whole=False):
        mine = asked.has(part.rows)
        if any(mask[mine].any() for mask in part.unchanged.values()):
            name = str(TableName(schema.schema, schema.name))
            raise Diverged(
                "rows keep large values that neither the log carries nor the rows that were read",
                where=name,
                remedy=f"headwater verify PIPELINE.yaml --table {name} --repair again",
            )
        if mine.any():
            tables.append(keep(part.rows.filter(pa.array(mine))))
    return replacement(schema, pa.concat_tables(tables), keys)


def replacement(schema: TableSchema, rows: pa.Table, keys: pa.Table) -> NetChanges:
    """`rows` are to stand under those of the `keys` that they have, and nothing under the others."""
    there = KeySet(schema, rows)
    if (there.numbers(rows) != np.arange(rows.num_rows)).any():
        raise Diverged(
            "the source has several rows under one key",
            where=f"{schema.schema}.{schema.name}",
            remedy="give the table in the pipeline file a key whose values are unique",
        )
    return NetChanges(
        rows=rows,
        stored=np.zeros(rows.num_rows, dtype=np.bool_),
        unchanged={},
        origins=None,
        removed=keys.filter(pa.array(~there.has(keys))),
        changes=keys.num_rows,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """`headwater.net_changes.Parts` of `part_of`."""

    schema: TableSchema
    read: Read
    leaves: tuple[int, ...]
    since: NetChanges | None
    scratch: Scratch
    keep: Keep
    whole: bool = True
    """Whether the rows are all that there are: then nothing else could give a value that is wanted."""
    where: Predicate | None = None

    @property
    def frame(self) -> NetChanges:
        """No rows, but everything else that all of the parts have in common."""
        names = self.since.unchanged if self.since is not None else {}
        nothing = np.zeros(0, dtype=np.bool_)
        return NetChanges(
            rows=lake_schema(self.schema).empty_table(),
            stored=nothing,
            unchanged=dict.fromkeys(names, nothing),
            origins=None,
            removed=key_schema(self.schema).empty_table(),
            changes=self.since.changes if self.since is not None else 0,
            truncated=not self.leaves and self.where is None,
            truncated_leaves=self.leaves,
            replaced=self.where,
        )

    def __iter__(self) -> Iterator[NetChanges]:
        since = _Since(self.schema, self.since, self.keep)
        for rows in self._read():
            left = since.without_superseded(rows)
            if left.num_rows:
                yield self._part(left)
        if self.since is None:
            return
        for part in self.since.in_parts():
            for filled in since.filled(part) if part.rows.num_rows else ():
                if self.where is not None:
                    filled = self._with_rows_around(filled, self.where)
                elif filled.unchanged and self.whole and not self.leaves:
                    raise Diverged(
                        "rows keep large values that neither the log carries nor the rows that were read",
                        where=f"{self.schema.schema}.{self.schema.name}",
                        remedy="reload it again",
                    )
                yield replace(self._part(filled.rows), unchanged=filled.unchanged, origins=filled.origins)

    def write_parquet(self, rows: pa.Table) -> str:
        return self.scratch(rows)

    def _with_rows_around(self, since: NetChanges, where: Predicate) -> NetChanges:
        """Changes of rows that may be of the predicate, or were, or neither: to put what the table holds already
        changes nothing. Its own rows stand under their newest keys, where they have all values. Without keys a row
        would be there twice: it only counts if it has just been emptied."""
        if self.schema.key:
            return replace(since, origins=None)
        return replace(since, rows=since.rows.filter(pa.array(matches(where, since.rows))))

    def _part(self, rows: pa.Table) -> NetChanges:
        return replace(self.frame, rows=rows, stored=np.zeros(rows.num_rows, dtype=np.bool_), unchanged={}, changes=0)

    def _read(self) -> Iterator[pa.Table]:
        """What was read at the source, without what a TRUNCATE has removed since."""
        if self.since is not None and self.since.truncated:
            return
        emptied = self.since.truncated_leaves if self.since is not None else ()
        if emptied and not self.schema.partitioned:
            return
        for rows in self.read():
            if emptied:
                gone = pc.is_in(rows[PARTITION_COLUMN], value_set=pa.array(emptied, pa.int64()))
                yield rows.filter(pc.invert(gone))
            else:
                yield rows


def _at_a_time(metadata: Any) -> int:
    """How many rows of a file are read together."""
    size = sum(int(metadata.row_group(group).total_byte_size) for group in range(metadata.num_row_groups))
    return max(1, min(_ROWS, int(metadata.num_rows) * _BYTES // max(size, 1)))


class _Since:
    """What the changes since have done to the rows that were read: keys that they put or remove, and values that they
    want of them."""

    def __init__(self, schema: TableSchema, changes: NetChanges | None, keep: Keep) -> None:
        self._schema = schema
        self._superseded = KeyIndex()
        self._values = ReadValues(schema, changes.unchanged if changes is not None else (), keep)
        if changes is None or not schema.key:
            return
        for part in changes.in_parts():
            for table in (part.rows, part.removed):
                codes = encode(schema, table.select(list(schema.key)))
                self._superseded.put(codes, place_of(1, np.arange(len(codes), dtype=np.int64)))
            self._values.want(part)

    def without_superseded(self, rows: pa.Table) -> pa.Table:
        """The rows that still stand; what is wanted of the others is kept."""
        if not self._schema.key:
            return rows
        codes = encode(self._schema, rows.select(list(self._schema.key)))
        self._values.take(codes, rows)
        gone: Bool = self._superseded.find(codes) != NOWHERE
        return rows.filter(pa.array(~gone)) if gone.any() else rows

    def filled(self, part: NetChanges) -> Iterator[NetChanges]:
        """`part` of the changes with the values that were found, in pieces that memory holds with them; what is left is
        for the table's own rows to give."""
        return self._values.filled(part)
