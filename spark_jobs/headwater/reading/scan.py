"""A table of a cut as a stream of Arrow batches, without Spark: what pyarrow, Polars, DuckDB and pandas take.

Read by delta-rs' own engine, which minds deletion vectors and mapped columns as its other readers do not. Its views
of texts and bytes become the plain types, which every consumer knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwater.errors import Refused
from headwater.lake.cuts import partitions_condition, refuse_behind, refuse_no_cut, version_gone, why_gone
from headwater.lake_root import refuse_misread
from headwater.names import TableName

if TYPE_CHECKING:
    import pyarrow as pa


def scan(
    cut: Mapping[str, Any],
    table: str | TableName,
    *,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    allow_behind: bool = False,
) -> pa.RecordBatchReader:
    """`headwater.scan`: the rows of `table` at the cut's version, in no order, read while they are taken.

    `columns`: only these, in this order. `where`: a condition in DataFusion's SQL; names as they are spelled in the
    lake. Refused when the cut does not hold the table or it is not in step (but for `allow_behind`), when its version
    is no longer kept, and for columns or conditions that delta-rs does not take.
    """
    import pyarrow as pa
    from deltalake.exceptions import DeltaError

    from headwater.delta.small_tables import open_version

    refuse_no_cut(cut)
    name = str(table if isinstance(table, TableName) else TableName.parse(table))
    entry = cut["tables"].get(name)
    if entry is None or entry["state"] == "absent":
        raise Refused(
            f"the cut does not hold {name}",
            code="not_in_cut",
            where=f"cut of pipeline {cut['pipeline']}, epoch {cut.get('epoch')}",
            remedy=f"name one of its tables: {', '.join(cut['tables'])}",
        )
    refuse_behind({**cut, "tables": {name: entry}}, allow_behind=allow_behind)
    try:
        refuse_misread(entry["path"])
    except ValueError as error:
        raise Refused(str(error), code="bad_argument", where=name, remedy="or read it with headwater.read") from None
    try:
        opened = open_version(entry["path"], entry["version"])
    except DeltaError as error:
        raise version_gone(cut, name, entry, str(error).splitlines()[0]) from error
    if reason := why_gone(cut, entry):
        raise version_gone(cut, name, entry, reason)
    try:
        only = partitions_condition(entry, '"')
        predicate = f"({where}) and {only}" if where and only else where or only or None
        found = opened.scan(columns=list(columns) if columns is not None else None, predicate=predicate)
    except DeltaError as error:
        raise Refused(
            f"delta-rs does not take these columns or this condition: {error}",
            code="bad_argument",
            where=name,
            remedy="spell columns as the lake does, those with capitals in the condition in double quotes",
        ) from error
    reader = pa.RecordBatchReader.from_stream(found)
    return reader.cast(pa.schema([field.with_type(_plain(field.type)) for field in reader.schema]))


def _plain(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    return kind
