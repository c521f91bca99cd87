"""`headwater verify --repair`: the rows under keys that differ are read again at the source and put in the place of the
lake's, in one commit a table (SAP HANA ATR, algorithm 5: resynchronise only what differs).

A table in step is repaired as by a reload of just these rows. One that is suspended has missed what came since, or
somebody else wrote to it: it is loaded again, but only what differs from the source's rows is written.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.arrow_types import key_schema, lake_schema
from headwater.config import Pipeline
from headwater.errors import Transient
from headwater.jobs.comparison import Candidates, Comparison
from headwater.jobs.hidden_columns import key_of
from headwater.jobs.key_reader import ORIGIN, KeyReader
from headwater.jobs.load import load
from headwater.jobs.load_progress import Report
from headwater.jobs.planning import Planner
from headwater.jobs.replacing import Replacing
from headwater.jobs.source_rows import rows_at, schema_now, units_of
from headwater.jobs.table_copy import Changed, Target, copy_whole, named_error
from headwater.jobs.units import BAD_VALUE, CHANGED, TableChanged
from headwater.lake import tables as lake_tables
from headwater.lake.apply import Applier
from headwater.lake.ledger import TableVersion, generation_app, read_generation
from headwater.lake.positional import Fence
from headwater.lake.registry import Registry, TableRecord, now_text
from headwater.lake.reload_records import Reload
from headwater.lake.reloaded import replacement, write_keys
from headwater.names import TableName
from headwater.schema import TableSchema
from headwater.source.catalog import signature
from headwater.source.connection import Connection
from headwater.source.renewal import newest
from headwater.source.samples import emit_marker
from headwater.source.snapshots import capture_point

log = logging.getLogger(__name__)

_MOST: Final = 100_000
"""Keys that differ: their rows are held in memory."""
_KEYS_PER_READ = 2_000


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
    One session reads, for at most half of the time: a repair is in no hurry, and the source has others to serve."""
    batches: list[pa.RecordBatch] = []
    seconds = 0.0
    for start in range(0, len(numbers), _KEYS_PER_READ):
        time.sleep(seconds)
        began = time.monotonic()
        texts = candidates.texts(numbers[start : start + _KEYS_PER_READ])
        key = key_of(pipeline, schema)
        reader = KeyReader(newest(pipeline.conninfo()), snapshot_id, schema, signatures, keys=texts, hash_key=key)
        batches += list(reader.read())
        seconds = time.monotonic() - began
    kind = lake_schema(schema).append(pa.field(ORIGIN, pa.int64()))
    rows = pa.Table.from_batches(batches).cast(kind) if batches else kind.empty_table()
    typed = candidates.keys.select(candidates.key_columns).take(pa.array(numbers, pa.int64()))
    return rows, typed.rename_columns(list(schema.key)).cast(key_schema(schema))


@dataclass(slots=True)
class Differences:
    """What a repair of a suspended table has found, and put right."""

    rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    keys: list[dict[str, Any]] = field(default_factory=list)
    whole: str = ""
    """Why the table was written anew instead; empty: it was not."""

    @property
    def repaired(self) -> int:
        return self.missing + self.extra + self.different


def repair_suspended(pipeline: Pipeline, table: TableName, shown: int, progress: Report) -> Differences:
    """Load `table` again by its differences, `shown` of which are named. Errors as of a load."""
    found = Differences()
    load(pipeline, [table], again=True, progress=progress, copy=partial(_copy_differences, found, shown))
    return found


def _copy_differences(found: Differences, shown: int, spark: SparkSession, target: Target) -> tuple[int, int]:
    """`headwater.jobs.table_load.Copy`: write what differs, or everything where that will not do."""
    try:
        return _write_differences(found, shown, spark, target)
    except TableChanged as changed:
        raise Changed(str(changed)) from changed
    except PySparkException as error:
        raise named_error(error, target.record) from error
    except _Whole as reason:
        log.info("%s: it is written anew: %s", target.record.name, reason)
        found.whole = str(reason)
        found.rows, size = copy_whole(spark, target)
        return found.rows, size


class _Whole(Exception):
    """The table must be written as a whole, for the reason given."""


def _write_differences(found: Differences, shown: int, spark: SparkSession, target: Target) -> tuple[int, int]:
    record, root, pipeline = target.record, target.pipeline.lake_path(), target.pipeline.name
    schema = record.schema
    comparison = Comparison(spark, schema)
    stands = lake_tables.current(target.path, record.app_id(pipeline))
    if comparison.multiset or schema.soft_delete or schema.history:
        raise _Whole("its rows cannot be told apart by a key" if comparison.multiset else "it keeps deleted rows")
    if stands is None:
        raise _Whole("there is nothing to compare with")
    snapshot = target.capture.snapshot_id
    units = units_of(target.connection, schema.leaves)
    target.progress.reading(record.name, snapshot, len(units))
    source = rows_at(spark, target.pipeline, target.connection, schema, snapshot, target.signatures, units)
    try:
        lake = spark.read.format("delta").option("versionAsOf", stands[0]).load(target.path)
        wanted = spark.createDataFrame([], lake_tables.struct_type(schema)).dtypes
        if not set(wanted) <= set(lake.dtypes):  # dropped columns stay
            raise _Whole("its columns or their types changed")
        found.rows, candidates = comparison.first_look(source, lake, _MOST)
    except PySparkException as error:
        if CHANGED in str(error) or BAD_VALUE in str(error):
            raise
        raise _Whole("the lake's table cannot be read") from error
    if candidates.more:
        raise _Whole(f"more than {_MOST} rows differ")
    numbers = range(candidates.keys.num_rows)
    rows, keys = _read_keys(target.pipeline, schema, snapshot, target.signatures, candidates, numbers)
    states = comparison.look_again(comparison.frame(rows.to_batches()), lake, comparison.numbered(candidates, numbers))
    if any(state.lake.count > 1 for state in states.values()):
        raise _Whole("a key is there more than once")
    for number, state in states.items():
        found.missing += state.missing
        found.extra += state.extra
        found.different += state.different
        if len(found.keys) < shown:
            found.keys.append({"key": candidates.shown(number), "kind": state.kind})
    applier = Applier(lambda: spark, Fence(generation_app(pipeline), read_generation(root, pipeline)))
    with contextlib.closing(applier):
        lenient = replace(record, on_divergence="repair")
        stand = TableVersion(*stands, record.state)
        changes = replacement(schema, rows.drop_columns([ORIGIN]), keys)
        plan = Planner(pipeline, root, applier, None).plan(
            lenient, changes, stand, target.confirmed_lsn, "repair of what differs from the source"
        )
        if plan.by_engine:
            raise _Whole(f"Spark writes it: {plan.by_engine}")
        applier.apply(replace(plan, verified=True))
    return found.rows, rows.nbytes
