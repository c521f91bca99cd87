"""The pipeline as its tables were loaded: what its file says of a selection since holds from their next load on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from headwater.lake.registry import TableRecord
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Columns, Pipeline
from headwater.schema import TableSchema


def registered_columns(schema: TableSchema, record: TableRecord) -> TableSchema:
    """`schema`, of the source as it is now, without the columns that were left out when the table was loaded, under
    whatever names they are there by now."""
    known = {column.attnum for column in record.schema.columns}
    if not record.schema.excluded:
        return schema
    last = record.schema.last_attnum
    return replace(schema, columns=tuple(c for c in schema.columns if c.attnum in known or c.attnum > last))


def as_registered(pipeline: Pipeline, records: Iterable[TableRecord]) -> Pipeline:
    """`pipeline` with the selections that `records` were loaded with."""
    entries = list(pipeline.tables)
    for record in records:
        name = TableName.parse(record.name)
        entry = pipeline.entry_for(name)
        if entry is None or not record.schemas:
            continue
        schema = record.schema
        # Names as the source has them: nothing is to be folded any more.
        columns = Columns.model_construct(exclude=schema.excluded, hash=tuple(schema.hashed), mask=schema.masked)
        if entry.columns == columns and entry.where == schema.where:
            continue
        selection = {"columns": columns, "where": schema.where}
        entries = [other for other in entries if other.name != name]
        entries.append(entry.model_copy(update={"name": name, "exclude": (), **selection}))
    return pipeline.model_copy(update={"tables": tuple(entries)})
