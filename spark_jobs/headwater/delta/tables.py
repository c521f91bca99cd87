"""The Delta tables that hold replicated rows: creation, applied position, and who committed what.

A table's applied position is the `txn` version of its own appId, written by the same commit as the rows. Its
version is expected to rise by one per commit of ours: anything else in between is looked at before going on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from delta.tables import DeltaTable
from deltalake import DeltaTable as RustTable
from pyspark.sql import SparkSession
from pyspark.sql.types import BooleanType, DataType, LongType, StructField, StructType, TimestampType

from headwater.delta import clustering, delta_log, storage
from headwater.delta.commit_notes import planned_on
from headwater.delta.layout import layout_of
from headwater.delta.log_entries import log_entry, read_actions
from headwater.delta.small_tables import open_table
from headwater.delta.storage import hadoop_place
from headwater.schema import DELETED, DELETED_AT, DELETED_LSN, PARTITION_COLUMN, TableSchema
from headwater.spark.session import require_exclusive

_PROPERTIES = {
    "delta.enableDeletionVectors": "true",
    # A checkpoint costs half a second; every tenth commit is too often at one commit a second.
    "delta.checkpointInterval": "100",
    # Old versions go only when no live cut needs them: never behind our back, by anybody's clean-up.
    "delta.enableExpiredLogCleanup": "false",
}
LIVING = (f"false AS {DELETED}", f"CAST(NULL AS BIGINT) AS {DELETED_LSN}", f"CAST(NULL AS TIMESTAMP) AS {DELETED_AT}")
"""The marks of a row that lives, as expressions of Spark SQL."""
NEEDS_MAPPING = frozenset(" ,;{}()\n\t=")
"""Characters that the name of a Parquet column cannot have for Spark."""
STATISTICS = "delta.dataSkippingStatsColumns"


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a table's log, as far as ownership matters. `data`: it added or removed rows.

    `overwrites`: what the table held before does not matter any more. `planned_on`: the version that one of our
    commits was planned on, and whose next it should be. `described`: for a person; `txn_id`: what it is called;
    `stands_on`: of one of ours, what the one below it was called; `terms`: it says something of the table's columns,
    properties or features.
    """

    version: int
    transactions: dict[str, int]
    data: bool
    operation: str
    metrics: dict[str, str]
    overwrites: bool = False
    planned_on: int | None = None
    described: str = ""
    txn_id: str = ""
    stands_on: str = ""
    terms: bool = False


def quoted(name: str) -> str:
    """`name` as an identifier of Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def struct_type(schema: TableSchema) -> StructType:
    """The table's columns as Spark types, in order, then `_hw_partition` where there are leaves, then the marks of
    `soft_delete`.

    Needs a running session: Spark parses its own type names.
    """
    fields = [StructField(c.name, DataType.fromDDL(c.value.lake), True) for c in schema.columns]
    if schema.partitioned:
        fields.append(StructField(PARTITION_COLUMN, LongType(), True))
    if schema.soft_delete:
        marks = ((DELETED, BooleanType()), (DELETED_LSN, LongType()), (DELETED_AT, TimestampType()))
        fields += [StructField(name, kind, True) for name, kind in marks]
    return StructType(fields)


def create(spark: SparkSession, path: str, schema: TableSchema, keep_cuts: float = 3600.0) -> None:
    """Create the empty Delta table at `path` unless there is one. `keep_cuts`: seconds that old versions are kept."""
    require_exclusive(spark, path)
    builder = DeltaTable.createIfNotExists(spark).location(hadoop_place(path))
    for column in struct_type(schema).fields:
        builder = builder.addColumn(column.name, column.dataType)
    if schema.partition_by:
        builder = builder.partitionedBy(*schema.partition_by)
    for name, value in properties(schema, keep_cuts).items():
        builder = builder.property(name, value)
    builder.execute()


def cluster(path: str, columns: Sequence[str], app_id: str = "") -> None:
    """Let Delta know by which columns the table at `path` is clustered, in a commit of nothing else, which leaves the
    applied position under `app_id` as it is."""
    snapshot = delta_log.read_snapshot(path)
    actions = clustering.change(snapshot, columns, layout_of(snapshot.metadata))
    if actions:
        said = {"newClusteringColumns": ",".join(columns)}
        info = delta_log.commit_info("CLUSTER BY", said, {}, snapshot.version)
        known = snapshot.transactions.get(app_id)
        mark = [] if known is None else [delta_log.transaction(app_id, known)]
        delta_log.commit(path, snapshot.version + 1, [info, *mark, *actions])


def properties(schema: TableSchema, keep_cuts: float) -> dict[str, str]:
    """The table's Delta properties at creation."""
    # What really is kept. Every checkpoint names all files that were removed within the retention: at a commit a second
    # those of a week, with a vector each for most data files, are millions of lines.
    retention = f"interval {math.ceil(keep_cuts)} seconds"
    chosen = {
        **_PROPERTIES,
        "delta.logRetentionDuration": retention,
        "delta.deletedFileRetentionDuration": retention,
    }
    if any(set(column.name) & NEEDS_MAPPING for column in schema.columns):
        chosen["delta.columnMapping.mode"] = "name"
    position = {column.name: index for index, column in enumerate(schema.columns)}
    if any(position[name] >= 32 for name in schema.key):
        # Statistics are collected for the first 32 columns only: without the key's, every look-up reads every file.
        first = (*schema.key, *(name for name in schema.cluster_by if name not in schema.key))
        others = [c.name for c in schema.columns if c.name not in first][: 32 - len(first)]
        chosen[STATISTICS] = ",".join(quoted(name) for name in (*first, *others))
    return chosen


def current(path: str, app_id: str, known: tuple[int, int] | None = None) -> tuple[int, int] | None:
    """(version, applied position) of the table at `path`; position 0 when it has none. None: there is no table.

    `known`: where it stood when it was last looked at. If it still stands there, its log is not opened: with thousands
    of tables of which few have changed, that is most of a start.
    """
    if known is not None and _still_stands(path, app_id, *known):
        return known
    table: RustTable | None = open_table(path)
    if table is None:
        return None
    return table.version(), table.transaction_version(app_id) or 0


def _still_stands(path: str, app_id: str, version: int, position: int) -> bool:
    commit = read_commit(path, version)
    if commit is None or commit.transactions.get(app_id) != position:
        return False
    return not storage.exists(log_entry(path, version + 1))


def commits_after(path: str, version: int) -> list[Commit]:
    """The commits above `version`, oldest first; empty in the usual case, for the price of one look at a name."""
    found = []
    while (commit := read_commit(path, version + 1)) is not None:
        found.append(commit)
        version += 1
    return found


def read_commit(path: str, version: int) -> Commit | None:
    """The commit `version` as its log file tells it; None when it does not exist (yet)."""
    actions = read_actions(path, version)
    if actions is None:
        return None
    info: dict[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
    parameters = info.get("operationParameters") or {}
    return Commit(
        version,
        {a["txn"]["appId"]: a["txn"]["version"] for a in actions if "txn" in a},
        any(a[kind].get("dataChange", True) for a in actions for kind in ("add", "remove") if kind in a),
        info.get("operation", "unknown"),
        {name: str(value) for name, value in (info.get("operationMetrics") or {}).items()},
        (parameters.get("mode") == "Overwrite" and not parameters.get("predicate"))
        or parameters.get("verified") == "true",
        planned_on(info),
        described(version, info),
        *_names(info),
        any(kind in action for action in actions for kind in ("metaData", "protocol", "domainMetadata")),
    )


def own_history(path: str, version: int, app_id: str, since: int | None) -> list[Commit]:
    """The commits up to `version` that decide what its rows are, oldest first: those above `since`, but none below
    the newest one of this incarnation that replaced or verified the whole content (its load, a truncate, a repair)."""
    found: list[Commit] = []
    while version > (since if since is not None else -1) and (commit := read_commit(path, version)) is not None:
        found.append(commit)
        if commit.overwrites and app_id in commit.transactions:
            break
        version -= 1
    return found[::-1]


def is_ours(commit: Commit, app_id: str) -> bool:
    """Whether the pipeline of `app_id` has made the commit: a load, a driver or one of its other jobs."""
    pipeline = app_id[: app_id.index("/", app_id.index("/") + 1) + 1]
    return commit.planned_on is not None or any(app.startswith(pipeline) for app in commit.transactions)


def foreign_data(commits: list[Commit], app_id: str) -> str:
    """Why the rows of these commits are not the log's; empty if they are.

    A commit of ours stands just above the version it was planned on, but for commits that only rearrange files. One
    that does not is a stopped driver's that woke up between its look at the table and Delta's: what it wrote was
    computed for other rows.
    """
    data: list[Commit] = []
    for commit in commits:
        if commit.data and app_id not in commit.transactions:
            return f"version {commit.version} ({commit.operation}) was written by another program"
        planned_on = commit.planned_on
        if planned_on is not None and any(before.version > planned_on for before in data):
            return (
                f"version {commit.version} of an earlier driver was planned on version {planned_on} and came too late"
            )
        if commit.data:
            data.append(commit)
    return ""


def replaced_below(path: str, commits: Sequence[Commit], newest: int) -> str:
    """Why an entry of the log up to version `newest`, which `commits` end at, is not the one that ours was put upon;
    empty if each is, as far as ours say so. The one below `commits` is looked at, too."""
    first = commits[0].version if commits else newest + 1
    lowest = first - (1 if commits else 2)
    infos = {version: delta_log.read_commit_info(path, version) for version in range(max(lowest, 0), first)}
    # What clean-up took is not told from what never said anything: both are left out.
    infos = {version: info for version, info in infos.items() if info and not (commits and commits[0].overwrites)}
    log = [(described(v, info), *_names(info)) for v, info in infos.items()]
    log += [(commit.described, commit.txn_id, commit.stands_on) for commit in commits]
    for (below, name, _), (_, _, stands_on) in pairwise(log):
        if stands_on and name != stands_on:
            return f"{below} was written by another program over the commit that was there"
    return ""


def described(version: int, info: Mapping[str, Any]) -> str:
    """A commit for a person: what its program calls it, and itself."""
    engine = info.get("engineInfo")
    return f"version {version} ({info.get('operation', 'unknown')}{f' by {engine}' if engine else ''})"


def _names(info: Mapping[str, Any]) -> tuple[str, str]:
    """What a commit is called, and the one that it stands on; empty where it does not say."""
    return str(info.get("txnId") or ""), str(info.get(delta_log.STANDS_ON) or "")
