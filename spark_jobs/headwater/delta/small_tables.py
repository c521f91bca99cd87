"""Small Delta tables of our own (ledger, registry): single-commit appends with exclusion, without a JVM.

delta-rs writes the next version with put-if-absent; with no retries a lost race raises instead of being rebased,
which is what the fence needs; a commit takes milliseconds and no JVM (docs/decisions/0003).
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

import pyarrow as pa
from deltalake import (
    CommitProperties,
    DeltaTable,
    Field,
    PostCommitHookProperties,
    QueryBuilder,
    Schema,
    Transaction,
    write_deltalake,
)
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from headwater.delta import storage
from headwater.delta.log_entries import (
    LostRace,
    TornEntry,
    files_of,
    log_entry,
    log_path,
    newest_whole,
    note_written,
    read_lines,
    require_version,
)
from headwater.delta.whole import lost_file
from headwater.errors import Transient
from headwater.lake_root import is_remote

_CONFIGURATION = {
    # Neither table loses old versions behind our back: headwater.maintain.control_tables decides.
    "delta.checkpointInterval": "100",
    "delta.enableExpiredLogCleanup": "false",
    # Nobody reads an old version of these. At one commit a second a week of removed files would fill checkpoints.
    "delta.deletedFileRetentionDuration": "interval 1 hours",
    "delta.logRetentionDuration": "interval 1 hours",
}
_OWN_ID = "headwaterCommit"
"""In what a commit says of itself: nobody else's has this value."""
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""A checkpoint at every hundredth commit would lie on the way of an epoch: it is written beside it."""


def open_table(path: str) -> DeltaTable | None:
    """The table at `path`, or None where there is none. Entries that are torn (`headwater.delta.log_entries`) and what
    was built on them do not count."""
    version = newest_whole(path)
    if version == -1:
        return None
    try:
        return open_version(path, version)
    except TableNotFoundError:
        return None


def open_version(path: str, version: int | None = None) -> DeltaTable:
    """The table at `path` as of `version` (None: the newest)."""
    return DeltaTable(path, version=version, storage_options=storage.delta_rs_options(path))


def footing(table: DeltaTable) -> str:
    """What tells the entry that `table` stands on from another one of its number; empty: it is gone. In a store, where
    none is ever lost, that is not asked."""
    folder = storage.path_of(table.table_uri)
    return "" if is_remote(folder) else storage.token(log_entry(folder, table.version())) or ""


def follow(table: DeltaTable, stood_on: str) -> DeltaTable:
    """`table`, brought to its newest version. It stays where it is while that is torn. `stood_on`: its footing as it
    was read. With another one, or none, what it stands on was taken by a power cut, or cleaned up: then it is opened
    anew."""
    folder = storage.path_of(table.table_uri)
    if stood_on == footing(table):
        try:
            table.update_incremental()
            return table
        except DeltaError:
            if newest_whole(folder) is not None:
                return table
            raise
    found = open_table(folder)
    if found is None:
        raise DeltaError(f"{folder} is gone")
    return found


def create_table(path: str, schema: pa.Schema) -> DeltaTable:
    """Create, or open when somebody was faster."""
    fields = Schema.from_arrow(schema)
    options = storage.delta_rs_options(path)
    table = DeltaTable.create(path, fields, mode="ignore", configuration=_CONFIGURATION, storage_options=options)
    note_written(storage.path_of(path), table.version())
    return table


def append_once(
    table: DeltaTable, rows: list[dict[str, Any]], schema: pa.Schema, transactions: dict[str, int] | None = None
) -> None:
    """Append `rows` as exactly the next version of `table`, with these `txn` entries; LostRace if it is taken.

    On success `table` stands at the version it committed.
    """
    _write_once(table, rows, schema, "append", transactions or {})


def replace_once(table: DeltaTable, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    """Replace the whole content by `rows` as exactly the next version; LostRace if it is taken."""
    _write_once(table, rows, schema, "overwrite", {})


def _write_once(
    table: DeltaTable,
    rows: list[dict[str, Any]],
    schema: pa.Schema,
    mode: Literal["append", "overwrite"],
    transactions: dict[str, int],
) -> None:
    folder, own_id = storage.path_of(table.table_uri), str(uuid.uuid4())
    require_version(folder, table.version())
    properties = CommitProperties(
        custom_metadata={_OWN_ID: own_id},
        max_commit_retries=0,
        app_transactions=[Transaction(app, version) for app, version in transactions.items()],
    )
    try:
        write_deltalake(
            table,
            pa.Table.from_pylist(rows, schema=schema),
            mode=mode,
            commit_properties=properties,
            post_commithook_properties=_NO_HOOKS,
        )
    except DeltaError as error:
        if not _is_ours(folder, table.version() + 1, own_id):
            raise _lost(table, error) from error
        table.update_incremental()
    note_written(folder, table.version())


def _is_ours(folder: str, version: int, own_id: str) -> bool:
    """Whether a commit that failed is there: a store's answer was lost, and its repetition was refused."""
    try:
        return any(own_id in line for line in read_lines(folder, version) or () if "commitInfo" in line)
    except OSError:
        return False


def make_durable(table: DeltaTable, known: int = -1) -> int:
    """Return when the version that `table` has just committed survives a power cut, and the one below, whose writer may
    not have got so far; unless that is `known`, by an earlier call. Returns the version."""
    folder, version = storage.path_of(table.table_uri), int(table.version())
    versions = (version,) if known == version - 1 else (version - 1, version)
    storage.sync_files(*(file for one in versions for file in files_of(folder, one)))
    return version


def _lost(table: DeltaTable, error: Exception) -> Exception:
    """What an error of a commit means: delta-rs says something else of a race that it lost when it cannot read any more
    what the other one did."""
    if isinstance(error, CommitFailedError):
        return LostRace(str(error))
    behind = open_version(table.table_uri).version() > table.version()
    return LostRace(str(error)) if behind else error


def compact(table: DeltaTable, target_size: int) -> int:
    """Make files below `target_size` bytes into larger ones; rows and their order stay. Returns how many went. Appends
    of others in between are no conflict; LostRace when another compaction was faster."""
    try:
        found = table.optimize.compact(target_size=target_size, post_commithook_properties=_NO_HOOKS)
    except CommitFailedError as error:
        raise LostRace(str(error)) from error
    note_written(storage.path_of(table.table_uri), table.version())
    return int(found["numFilesRemoved"])


def write_checkpoint(folder: str) -> int:
    """A checkpoint of the newest version of the table in `folder`; returns that version."""
    table = open_version(folder)
    table.create_checkpoint()
    # Hadoop would compare the new pointer with the checksum of the one that Spark wrote before.
    storage.delete(log_path(folder, "._last_checkpoint.crc"))
    # Half a checkpoint would end readers who begin at it.
    version = int(table.version())
    storage.sync_files(log_path(folder, f"{version:020d}.checkpoint.parquet"), log_path(folder, "_last_checkpoint"))
    return version


def query(table: DeltaTable, sql: str) -> pa.Table:
    """The answer to `sql` about the table `t`, as it stands loaded (file statistics prune)."""
    try:
        return pa.table(QueryBuilder().register("t", table).execute(sql).read_all())
    except Exception as error:  # the engine tells every failure by this class
        try:
            why = lost_file(storage.path_of(table.table_uri), table.version())
        except (FileNotFoundError, TornEntry) as torn:
            why = str(torn)
        if not why:
            raise
        raise Transient(
            f"a file of the lake is missing or damaged: {why}",
            code="lake_unavailable",
            where="the lake's control tables",
            remedy="run headwater replicate PIPELINE.yaml: after a power cut it repairs this, else it says what to do",
        ) from error


def select(table: DeltaTable, condition: str = "true", columns: str = "*") -> list[dict[str, Any]]:
    """The rows of `table` that meet the SQL `condition`, or these `columns` of them."""
    found = query(table, f"select {columns} from t where {condition}")
    rows: list[dict[str, Any]] = found.to_pylist(maps_as_pydicts="strict")
    return rows


__all__ = [
    "DeltaTable",
    "Field",
    "LostRace",
    "append_once",
    "compact",
    "create_table",
    "follow",
    "footing",
    "make_durable",
    "open_table",
    "open_version",
    "query",
    "replace_once",
    "require_version",
    "select",
    "write_checkpoint",
]
