"""The rows that a table has in the lake, read for another shape of it: by a task, some files at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from headwater.apply.by_spark.tasks import shared_out
from headwater.apply.live_files import deleted_rows
from headwater.arrow_types import lake_schema
from headwater.delta.data_files import column_batches, live_batches
from headwater.delta.delta_log import DataFile, Snapshot
from headwater.delta.layout import Layout
from headwater.delta.small_versions import damage_named
from headwater.errors import Refused
from headwater.load.stretches import FEW_PARTITIONS
from headwater.names import yaml_key
from headwater.schema import TableSchema

_OF_A_TASK: Final = 64 << 20
"""Bytes of files that a task reads, at least."""
_LOOKED_AT: Final = 5
"""Files, large ones and small ones."""


@dataclass(frozen=True)
class PartitionTexts:
    """Columns of text that are to partition the `table`, and whether an empty text becomes NULL in each: from now on it
    is a bad value, since Delta takes it for NULL there."""

    table: str
    columns: tuple[tuple[str, bool], ...]

    def fit(self, rows: pa.Table) -> pa.Table:
        """Refused for an empty text that does not become NULL."""
        for name, becomes_null in self.columns:
            empty = pc.equal(rows[name], "")
            if not becomes_null and pc.any(empty).as_py():
                raise self.refused(name)
            without = pc.if_else(empty, pa.scalar(None, pa.string()), rows[name])
            rows = rows.set_column(rows.column_names.index(name), name, without)
        return rows

    def refused(self, name: str) -> Refused:
        return Refused(
            f"{name} holds empty texts, which Delta takes for NULL in a partition column",
            code="bad_value",
            where=self.table,
            remedy=f'set on_bad_value: {{{yaml_key(name)}: "null"}} in the pipeline file, or choose another column',
        )


Source = tuple[DataFile, BitMap]
"""A file, and which of its rows are gone."""


def in_groups(snapshot: Snapshot) -> list[list[Source]]:
    """The files of the table as tasks are to read them: small ones together. TableUnreadable."""
    with damage_named():
        sources = [(file, deleted_rows(snapshot, file)) for file in snapshot.files.values()]
    return shared_out(sources, lambda source: source[0].size, _OF_A_TASK)


@dataclass(frozen=True)
class StoredRows:
    """Reads the rows of some files of the table in `folder`, as the new shape takes them. TableUnreadable, and Refused
    for what it does not take."""

    folder: str
    schema: TableSchema
    layout: Layout
    texts: PartitionTexts

    def __call__(self, sources: list[Source]) -> Iterator[pa.Table]:
        kind = lake_schema(self.schema)
        with damage_named():
            for file, gone in sources:
                yield from map(self.texts.fit, live_batches(self.folder, file, gone, kind, self.layout))

    def lie_together(self, files: Sequence[DataFile], partition_by: tuple[str, ...]) -> bool:
        """Whether the rows of a file are of few partitions, as far as some of the `files` tell."""
        kind = pa.schema([lake_schema(self.schema).field(name) for name in partition_by])
        by_size = sorted(files, key=lambda file: file.size, reverse=True)
        some = by_size[:: -(-len(by_size) // _LOOKED_AT)] if by_size and partition_by else ()
        return all(self._partitions(file, kind) <= FEW_PARTITIONS for file in some)

    def _partitions(self, file: DataFile, kind: pa.Schema) -> int:
        """Of how many the rows are; or more than a few. All are looked at: they may be in the order of them."""
        found = kind.empty_table()
        with damage_named():
            for rows in column_batches(self.folder, file, kind, self.layout):
                found = pa.concat_tables([found, rows]).group_by(kind.names).aggregate([])
                if found.num_rows > FEW_PARTITIONS:
                    break
        return int(found.num_rows)
