"""`headwater verify --repair`: the rows under keys that differ are read again at the source and put in the place of the
lake's, in one commit a table (SAP HANA ATR, algorithm 5: resynchronise only what differs).

A table in step is repaired as by a reload of just these rows. One that is suspended has missed what came since, or
another program wrote to it: it is loaded again, but only what differs from the source's rows is written.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException

from headwater.apply.applier import Applier
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.direct import Fence
from headwater.apply.plan import PlanAgain
from headwater.apply.replacement import replacement, write_keys
from headwater.arrow_types import key_schema, lake_schema
from headwater.columns.hidden import key_of
from headwater.delta import tables as lake_tables
from headwater.delta.clustering import clustered_by
from headwater.delta.delta_log import read_snapshot
from headwater.delta.delta_types import fields_of
from headwater.delta.index.index import KeySet
from headwater.delta.layout import layout_of
from headwater.delta.small_versions import TableUnreadable
from headwater.errors import Transient
from headwater.lake.ledger import TableVersion, generation_app, read_generation
from headwater.lake.registry import Registry, TableRecord, now_text
from headwater.lake.reload_records import Reload
from headwater.load.copy import CopyTarget, NotAtThisCapturePoint, copy_whole, named_error
from headwater.load.load import load
from headwater.load.progress import Report
from headwater.load.rows_by_key import ORIGIN, KeyReader
from headwater.load.source_rows import schema_now
from headwater.load.units import BAD_VALUE, CHANGED, TableChanged, UnfitValue, bad_value
from headwater.log.blocks import Transactions
from headwater.log.net.soft_delete import SINCE_1970, marked
from headwater.names import TableName
from headwater.net_changes import Deletions, NetChanges
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position
from headwater.predicate import Every, OneOf, Predicate, Some
from headwater.reload.replacing import Replacing, finish_what_was_read
from headwater.replicate.tables.planning import Planner
from headwater.schema import DELETED, TableSchema
from headwater.source.catalog.catalog import signature
from headwater.source.connection import Connection
from headwater.source.renewal import newest
from headwater.source.samples import emit_marker
from headwater.source.snapshots import capture_point
from headwater.spark.session import SparkOnDemand
from headwater.verify.candidates import INDEX, Candidates
from headwater.verify.comparison import Comparison, comparison_of
from headwater.verify.sides import KEYS_PER_READ, Sides, sides_of

log = logging.getLogger(__name__)

_MOST: Final = 100_000
"""Keys that differ: their rows are held in memory."""
_MOST_SEVERAL: Final = 1_000
"""Keys that have several rows in the lake: each is looked for in all files."""
_EXACT: Final = frozenset({"tinyint", "smallint", "int", "bigint", "string", "date", "timestamp", "timestamp_ntz"})
"""Types of which a predicate finds the rows that are equal as keys."""


@dataclass(slots=True)
class Repair:
    """Repairs the keys `numbers` of `candidates`; a driver must run."""

    pipeline: Pipeline
    registry: Registry
    connection: Connection
    record: TableRecord
    candidates: Candidates
    numbers: Sequence[int]

    def run(self) -> int:
        """How many keys hold now what the source held. Transient when the driver or the source goes away."""
        count = len(self.numbers)
        finish_what_was_read(self.pipeline, self.connection, self.registry, self.record.name, log.info)
        self.record = self.registry.tables[self.record.name]
        shown = f"{self.record.name} ({count} key{'s' if count > 1 else ''} that differ{'' if count > 1 else 's'})"
        Replacing(self.pipeline, self.connection, self.registry, self.record, shown, keys=True).run(self._read)
        return count

    def _read(self, asked: Reload) -> Reload:
        with capture_point(self.pipeline.conninfo(), self.pipeline.load.max_snapshot_age) as capture:
            emit_marker(self.connection)  # what is seen must outlive a crash of the server
            # A partition that was detached is a table still, and its rows are none of this one's.
            schema = schema_now(self.connection, self.pipeline, self.record)
            signatures = signature(self.connection, [leaf.relation_id for leaf in schema.leaves])
            try:
                rows, keys = _read_keys(
                    self.pipeline, schema, capture.snapshot_id, signatures, self.candidates, self.numbers
                )
            except TableChanged as changed:
                remedy = "verify again when the schema rests; nothing was changed"
                raise Transient(str(changed), where=asked.table, remedy=remedy) from changed
            except UnfitValue as unfit:
                raise bad_value(str(unfit), asked.table, schema) from unfit
        write_keys(self.pipeline.lake_path(), asked.name, keys, rows.drop_columns([ORIGIN]))
        return replace(
            asked,
            state="read",
            since=now_text(),
            snapshot=str(capture.snapshot),
            capture_lsn=capture.position.lsn,
            rows=rows.num_rows,
        )


def _read_keys(
    pipeline: Pipeline,
    schema: TableSchema,
    snapshot_id: str,
    signatures: dict[int, Any],
    candidates: Candidates,
    numbers: Sequence[int],
) -> tuple[pa.Table, pa.Table]:
    """The rows at the source under these keys, the transaction that wrote each as the last column; and all the keys.
    One session reads, for at most half of the time: a repair is in no hurry, and the source has others to serve.

    The source may give a row for a key that is equal to its own and another text (a collation, citext, a numeric of
    another scale): for the lake they are two keys, and the row is read under its own."""
    kind = lake_schema(schema).append(pa.field(ORIGIN, pa.int64()))
    keys = candidates.typed(numbers).rename_columns(list(schema.key)).cast(key_schema(schema))
    found = [kind.empty_table()]
    seconds = 0.0
    for start in range(0, len(numbers), KEYS_PER_READ):
        time.sleep(seconds)
        began = time.monotonic()
        texts = candidates.texts(numbers[start : start + KEYS_PER_READ])
        key = key_of(pipeline, schema)
        reader = KeyReader(newest(pipeline.conninfo()), snapshot_id, schema, signatures, keys=texts, hash_key=key)
        asked = KeySet(schema, keys.slice(start, KEYS_PER_READ))
        rows = reader.rows()
        found.append(rows.filter(pa.array(asked.has(rows))))
        seconds = time.monotonic() - began
    return pa.concat_tables(found), keys


@dataclass(slots=True)
class Differences:
    """What a repair of a suspended table has found, at which position, and put right."""

    rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    keys: list[dict[str, Any]] = field(default_factory=list)
    whole: str = ""
    """Why the table was written anew instead; empty: it was not."""
    position: Position | None = None

    @property
    def repaired(self) -> int:
        return self.missing + self.extra + self.different

    def note(self, candidates: Candidates, shown: int) -> None:
        self.missing, self.extra, self.different = candidates.missing, candidates.extra, candidates.different
        few = range(min(shown, candidates.keys.num_rows))
        self.keys = [{"key": candidates.shown(number), "kind": candidates.kind(number)} for number in few]


def repair_suspended(pipeline: Pipeline, table: TableName, shown: int, progress: Report) -> Differences:
    """Load `table` again by its differences, `shown` of which are named. Errors as of a load."""
    found = Differences()
    load(pipeline, [table], again=True, progress=progress, copy=partial(_copy_differences, found, shown))
    return found


def _copy_differences(found: Differences, shown: int, spark: SparkOnDemand, target: CopyTarget) -> tuple[int, int]:
    """`headwater.load.one_table.Copy`: write what differs, or everything where that will not do."""
    found.position, found.whole = target.capture.position, ""
    try:
        return _write_differences(found, shown, spark, target)
    except TableChanged as changed:
        raise NotAtThisCapturePoint(str(changed)) from changed
    except (PySparkException, UnfitValue) as error:
        raise named_error(error, target.record) from error
    except _Whole as reason:
        log.info("%s: it is rewritten: %s", target.record.name, reason)
        found.whole = str(reason)
        found.rows, size = copy_whole(spark, target)
        return found.rows, size


class _Whole(Exception):
    """The table must be written as a whole, for the reason given."""


def _write_differences(found: Differences, shown: int, spark: SparkOnDemand, target: CopyTarget) -> tuple[int, int]:
    record, root, pipeline = target.record, target.pipeline.lake_path(), target.pipeline.name
    schema, read = record.schema, record.schema.without_marks()
    stands = lake_tables.current(target.path, record.app_id(pipeline))
    if stands is None:
        raise _Whole("there is nothing to compare with")
    _refuse_other_shape(target.path, schema)
    snapshot = target.capture.snapshot_id
    try:
        at = (target.pipeline, target.connection, read, snapshot, target.signatures)
        sides = sides_of(*at, target.path, stands[0])
        target.progress.reading(record.name, snapshot, len(sides.units))
        if not sides.same_types:
            raise _Whole("its columns or their types changed")
        comparison = comparison_of(sides, spark)
        found.rows, candidates = comparison.first_look(sides, _MOST)
    except TableUnreadable as error:
        raise _Whole(str(error)) from error
    except PySparkException as error:
        if CHANGED in str(error) or BAD_VALUE in str(error):
            raise
        raise _Whole("its Delta table cannot be read") from error
    found.note(candidates, shown)
    if candidates.more:
        raise _Whole(f"more than {_MOST} rows differ")
    if comparison.multiset:
        changes = _added(comparison, sides, candidates)
    else:
        changes = _put_right(target, read, candidates)
    fence = Fence(generation_app(pipeline), read_generation(root, pipeline))
    applier = Applier(spark, fence, tasks=FileTasks(spark, root))
    with contextlib.closing(applier):
        lenient = replace(record, on_divergence="repair")
        stand = TableVersion(*stands, record.state)
        plan = Planner(pipeline, root, applier, None).plan(
            lenient, changes, stand, target.confirmed_lsn, "repair of what differs from the source"
        )
        if plan.by_engine:
            raise _Whole(f"Spark writes it: {plan.by_engine}")
        try:
            applier.commit(replace(plan, verified=True))
        except PlanAgain as again:
            raise NotAtThisCapturePoint("another program has committed to its table in the lake") from again
    return found.rows, changes.rows.nbytes


def _refuse_other_shape(path: str, schema: TableSchema) -> None:
    """What the pipeline file says by now, and the registry from this load on, holds for every row: columns that stay at
    the source, what becomes of deleted rows, how rows lie. Asked of the lake's table itself, whoever began before."""
    snapshot = read_snapshot(path)
    layout, names = layout_of(snapshot.metadata), {column["name"] for column in fields_of(snapshot.metadata)}
    if there := sorted(names.intersection(schema.excluded)):
        raise _Whole(f"the pipeline file excludes the column{'s' if len(there) > 1 else ''} {', '.join(there)} by now")
    if (DELETED in names) != schema.soft_delete:
        raise _Whole("soft_delete is another than in the lake")
    if layout.partition_by != schema.partition_by:
        raise _Whole("partition_by is another than in the lake")
    if clustered_by(snapshot) != tuple(map(layout.in_files, schema.cluster_by)):
        raise _Whole("cluster_by is another than in the lake")


def _added(comparison: Comparison, sides: Sides, candidates: Candidates) -> NetChanges:
    """What puts a table without a key right: rows that it lacks."""
    if candidates.extra:
        raise _Whole("it has rows too many, and no key to find them by")
    if candidates.missing > _MOST:  # of which many may be equal, and one key
        raise _Whole(f"more than {_MOST} rows differ")
    kind = lake_schema(sides.schema)
    rows = kind.empty_table()
    if candidates.missing:
        found = comparison.source_rows(sides, candidates, range(candidates.keys.num_rows))
        copies = -candidates.surplus[found[INDEX].to_numpy()]
        at = np.repeat(np.arange(found.num_rows), copies)
        rows = found.drop_columns([INDEX]).cast(kind).take(pa.array(at))
    nothing = np.zeros(rows.num_rows, dtype=np.bool_)
    return NetChanges(rows, nothing, {}, None, key_schema(sides.schema).empty_table(), rows.num_rows)


def _put_right(target: CopyTarget, schema: TableSchema, candidates: Candidates) -> NetChanges:
    """What puts the rows under the keys that differ right."""
    numbers = range(candidates.keys.num_rows)
    rows, keys = _read_keys(target.pipeline, schema, target.capture.snapshot_id, target.signatures, candidates, numbers)
    # By its key one row is found, and these keys have more.
    several = np.flatnonzero(candidates.surplus + KeySet(schema, rows).has(keys) > 1)
    changes = replacement(schema, rows.drop_columns([ORIGIN]), keys)
    if target.record.schema.soft_delete:
        changes = _deleted_now(target, changes)
    if not len(several):
        return changes
    return replace(changes, replaced=_of_keys(schema, keys.take(pa.array(several))))


def _deleted_now(target: CopyTarget, changes: NetChanges) -> NetChanges:
    """Rows that the source does not have any more stay with the capture point as the moment of their deletion: when it
    was is not known."""
    put, gone = changes.rows.num_rows, changes.removed.num_rows
    now = int(time.time() * 1e6) - SINCE_1970
    one = [np.array([value], dtype=np.int64) for value in (0, target.capture.position.lsn, now, 0)]
    deletions = Deletions(np.full(put, -1, dtype=np.int64), np.zeros(gone, dtype=np.int64), {})
    return marked(target.record.schema, replace(changes, deletions=deletions), Transactions(*one))


def _of_keys(schema: TableSchema, keys: pa.Table) -> Predicate:
    """True of the rows under `keys`."""
    kinds = [schema.column(name).value.lake for name in schema.key]
    if len(keys) > _MOST_SEVERAL or not all(kind in _EXACT or kind.startswith("decimal") for kind in kinds):
        raise _Whole("keys are there more than once")
    if len(schema.key) == 1:
        return OneOf(schema.key[0], tuple(keys[schema.key[0]].to_pylist()))
    found = [Every(tuple(OneOf(name, (value,)) for name, value in row.items())) for row in keys.to_pylist()]
    return Some(tuple(found))
