"""Small Delta tables of our own (ledger, registry): single-commit appends with exclusion, without a JVM.

delta-rs writes the next version with put-if-absent; with no retries a lost race raises instead of being rebased,
which is what the fence needs; a commit takes milliseconds and no JVM (docs/decisions/0003).
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, QueryBuilder, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError

# Neither table may lose old versions behind our back, and both are read from checkpoints when they grow.
_CONFIGURATION = {"delta.checkpointInterval": "100", "delta.enableExpiredLogCleanup": "false"}


class LostRace(Exception):
    """Another writer committed the version that this one wanted; reload and decide anew."""


def open_table(path: str) -> DeltaTable | None:
    """The table at `path`, or None where there is none."""
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        return None


def create_table(path: str, schema: pa.Schema) -> DeltaTable:
    """Create, or open when somebody was faster."""
    fields = Schema.from_arrow(schema)
    return DeltaTable.create(path, fields, mode="ignore", configuration=_CONFIGURATION)


def append_once(
    table: DeltaTable, rows: list[dict[str, Any]], schema: pa.Schema, transactions: dict[str, int] | None = None
) -> None:
    """Append `rows` as exactly the next version of `table`, with these `txn` entries; LostRace if it is taken.

    On success `table` stands at the version it committed.
    """
    properties = CommitProperties(
        max_commit_retries=0,
        app_transactions=[Transaction(app, version) for app, version in (transactions or {}).items()],
    )
    try:
        write_deltalake(table, pa.Table.from_pylist(rows, schema=schema), mode="append", commit_properties=properties)
    except CommitFailedError as error:
        raise LostRace(str(error)) from error


def replace_once(table: DeltaTable, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    """Replace the whole content by `rows` as exactly the next version; LostRace if it is taken."""
    properties = CommitProperties(max_commit_retries=0)
    try:
        write_deltalake(
            table, pa.Table.from_pylist(rows, schema=schema), mode="overwrite", commit_properties=properties
        )
    except CommitFailedError as error:
        raise LostRace(str(error)) from error


def select(table: DeltaTable, condition: str = "true") -> list[dict[str, Any]]:
    """The rows of `table`, as it stands loaded, that meet the SQL `condition` (file statistics prune)."""
    result = QueryBuilder().register("t", table).execute(f"select * from t where {condition}").read_all()
    rows: list[dict[str, Any]] = pa.table(result).to_pylist(maps_as_pydicts="strict")
    return rows


__all__ = ["DeltaTable", "Field", "LostRace", "append_once", "create_table", "open_table", "replace_once", "select"]
