"""The pipeline as its tables were loaded: what its file says of a selection since holds from their next load on."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.config import Columns, Pipeline
from headwater.lake.registry import TableRecord
from headwater.names import TableName


def as_registered(pipeline: Pipeline, records: Iterable[TableRecord]) -> Pipeline:
    """`pipeline` with the selections that `records` were loaded with."""
    entries = list(pipeline.tables)
    for record in records:
        name = TableName.parse(record.name)
        entry = pipeline.entry_for(name)
        if entry is None or not record.schemas:
            continue
        schema = record.schema
        if (entry.columns.exclude, entry.where) == (schema.excluded, schema.where):
            continue
        selection = {"columns": Columns(exclude=schema.excluded), "where": schema.where}
        entries = [other for other in entries if other.name != name]
        entries.append(entry.model_copy(update={"name": name, "exclude": (), **selection}))
    return pipeline.model_copy(update={"tables": tuple(entries)})
