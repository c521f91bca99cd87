"""The table of all changes beside a table with `history`: where it lies, what its columns are, how it is read.

It lies at the table's own path and `~history`: of a name every `~` is followed by two hexadecimal digits, so no other
table can lie there. Its applied position has an appId of its own. Loads leave it standing: a row `load` marks a
new one, columns that the table has gained are added, those that it has lost stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headwater.errors import ForeignWrite, Refused, SchemaChanged
from headwater.history_columns import history_schema
from headwater.lake.cuts import HISTORY, history_name, read_version, refuse_at_source, refuse_behind, refuse_no_cut
from headwater.names import TableName
from headwater.schema import Column, is_wider

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.delta.delta_log import Snapshot
    from headwater.lake.registry import TableRecord


def history_record(record: TableRecord, others: tuple[Column, ...] = ()) -> TableRecord:
    """The history of `record`'s table as a table: another name and path, the same incarnation."""
    return replace(
        record,
        name=history_name(record.name),
        path=record.path + HISTORY,
        schemas=((record.schemas[-1][0], history_schema(record.schema, others)),),
    )


def stored_record(record: TableRecord, snapshot: Snapshot) -> TableRecord:
    """The same with the columns that its Delta table has besides, from earlier loads."""
    return history_record(record, tuple(_columns_of(snapshot)))


def lacking(record: TableRecord, snapshot: Snapshot) -> tuple[tuple[Column, ...], tuple[Column, ...]]:
    """The columns that the history of `record`'s table has to have and does not, and those that it has with another
    type or in another spelling: Delta does not tell case apart."""
    schema = history_record(record).schema
    stored = {column.name.lower(): (column.name, column.value.lake) for column in _columns_of(snapshot)}
    missing = tuple(column for column in schema.columns if column.name.lower() not in stored)
    known = [column for column in schema.columns if column.name.lower() in stored]
    others = tuple(column for column in known if stored[column.name.lower()] != (column.name, column.value.lake))
    return missing, others


def wider(columns: Iterable[Column], snapshot: Snapshot) -> tuple[Column, ...]:
    """Those of `columns` whose type is wider than the one that the history holds under the name."""
    stored = {column.name: column.value.lake for column in _columns_of(snapshot)}
    return tuple(column for column in columns if is_wider(column.value.lake, stored.get(column.name, "")))


def holds_others(record: TableRecord, path: str, others: Iterable[Column]) -> SchemaChanged:
    return SchemaChanged(
        f"its history holds other types or spellings under the names {', '.join(column.name for column in others)}",
        where=record.name,
        remedy=f"move the folder {path} to another place to begin a new history (or set history: false), then "
        f"headwater load PIPELINE.yaml --table {record.name} --again",
    )


def refuse_foreign(path: str, since: int, prefix: str, name: str) -> None:
    """ForeignWrite when a commit above version `since` holds rows that none of this table's loads or drivers wrote, or
    makes another table of it."""
    from headwater.delta.foreign_terms import foreign_terms
    from headwater.delta.tables import commits_after

    commits = commits_after(path, since)
    strange = (c for c in commits if c.data and not any(app_id.startswith(prefix) for app_id in c.transactions))
    problem = next(
        (f"version {c.version} ({c.operation}) of its history was written by another program" for c in strange), ""
    )
    if not problem and (why := foreign_terms(path, commits, prefix, appended_to=True)):
        problem = f"its history: {why}"
    if problem:
        raise ForeignWrite(
            problem,
            where=name,
            remedy=f"find out what it is; headwater load PIPELINE.yaml --table {name} --again goes on from there",
        )


def history(
    spark: SparkSession, cut: Mapping[str, Any], table: str | TableName, *, allow_behind: bool = False
) -> DataFrame:
    """Every change of `table` up to `cut`, in no order: sort by `_hw_lsn` and `_hw_sequence`.

    Refused when the cut names no history of it, when the table is not in step (but for `allow_behind`), and when the
    version is no longer kept.
    """
    refuse_no_cut(cut)
    refuse_at_source(cut)
    name = str(table if isinstance(table, TableName) else TableName.parse(table))
    where = f"cut of pipeline {cut['pipeline']}, epoch {cut['epoch']}"
    entry = cut["tables"].get(name)
    if entry is None or "history" not in entry:
        raise Refused(
            f"the cut has no history of {name}",
            code="no_history",
            where=where,
            remedy="name a table of the cut that has `history: true` in the pipeline file and was loaded with it",
        )
    refuse_behind({**cut, "tables": {name: entry}}, allow_behind=allow_behind)
    return read_version(spark, cut, f"the history of {name}", entry["history"])


def _columns_of(snapshot: Snapshot) -> list[Column]:
    from headwater.delta.delta_types import fields_of, value_type

    fields = fields_of(snapshot.metadata)
    return [Column(f["name"], 0, 0, -1, value_type(f["type"])) for f in fields if f["name"] != "_hw_partition"]


__all__ = ["history", "history_record", "refuse_foreign", "stored_record"]
