"""How a load begins the history of a table with `history`: the table of changes is there, has a column for each of the
table's, and a row `load` says where another incarnation begins. Here and now, as small tables are written
(`headwater.apply.whole_table`); by Spark where the history has rules that only Delta knows.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from headwater.apply import whole_table
from headwater.apply.direct import obstacle
from headwater.arrow_types import lake_schema
from headwater.delta import delta_log
from headwater.delta.commit_notes import USER_METADATA, note
from headwater.delta.delta_log import Snapshot, read_snapshot
from headwater.delta.layout import layout_of
from headwater.delta.log_entries import Action
from headwater.delta.metadata import columns_change
from headwater.delta.new_files import discard, write_rows
from headwater.delta.small_tables import LostRace
from headwater.delta.spark_rows import table_in_sql
from headwater.delta.storage import hadoop_place
from headwater.delta.tables import quoted
from headwater.history_columns import INCARNATION, LSN, OPERATION, SEQUENCE
from headwater.lake.executors import refuse_engine
from headwater.lake.history import history_record, holds_others, lacking, stored_record
from headwater.lake.registry import TableRecord
from headwater.spark.session import SparkOnDemand, for_thread

_TRIES = 3


def prepare(spark: SparkOnDemand, path: str, record: TableRecord, keep_cuts: float) -> None:
    """Before a load copies anything: the history's table is there and has a column for each of the table's."""
    whole_table.create(path, history_record(record).schema, keep_cuts)

    def put(snapshot: Snapshot) -> None:
        missing, others = lacking(record, snapshot)
        if others:
            raise holds_others(record, path, others)
        if missing and (why := obstacle(snapshot)):
            refuse_engine(path, record.name, why)
            columns = ", ".join(f"{quoted(c.name)} {c.value.lake}" for c in missing)
            ours = for_thread(spark())
            ours.conf.set(USER_METADATA, note(snapshot.version))  # else it is taken for another program's
            ours.sql(f"ALTER TABLE {table_in_sql(path)} ADD COLUMNS ({columns})")
        elif missing:
            info = _commit_info("ADD COLUMNS", {"columns": ",".join(c.name for c in missing)}, 0, snapshot)
            change = columns_change(snapshot, stored_record(record, snapshot).schema)
            delta_log.commit(path, snapshot.version + 1, [info, *change])

    _on_newest(path, put)


def mark_load(spark: SparkOnDemand, path: str, record: TableRecord, app_id: str, lsn: int, confirmed_lsn: int) -> None:
    """The row `load` of the incarnation that begins at the capture point `lsn`. Its commit carries the slot's confirmed
    position, as the load's own does: nothing is skipped by it."""
    said = {OPERATION: "load", LSN: lsn, SEQUENCE: 0, INCARNATION: record.incarnation}

    def put(snapshot: Snapshot) -> None:
        if why := obstacle(snapshot):
            refuse_engine(path, record.name, why)
            kinds = f"{OPERATION} string, {LSN} bigint, {SEQUENCE} bigint, {INCARNATION} bigint"
            row = spark().createDataFrame([tuple(said.values())], kinds).coalesce(1)
            writer = row.write.format("delta").mode("append")
            writer.option("txnAppId", app_id).option("txnVersion", confirmed_lsn).save(hadoop_place(path))
            return
        kind = lake_schema(stored_record(record, snapshot).schema)
        rows = pa.Table.from_pylist([said], schema=kind)
        added = [one.file for one in write_rows(path, kind, [rows], layout_of(snapshot.metadata))]
        actions = [
            _commit_info("WRITE", {"mode": "Append"}, 1, snapshot),
            delta_log.transaction(app_id, confirmed_lsn),
            *(delta_log.add(file) for file in added),
        ]
        try:
            delta_log.commit(path, snapshot.version + 1, actions)
        except LostRace:
            discard(path, added)
            raise

    _on_newest(path, put)


def _on_newest(path: str, put: Callable[[Snapshot], None]) -> None:
    """Somebody may rearrange its files meanwhile: then once more, on what is there by now."""
    for left in reversed(range(_TRIES)):
        try:
            put(read_snapshot(path))
            return
        except LostRace:
            if not left:
                raise


def _commit_info(operation: str, said: dict[str, str], rows: int, snapshot: Snapshot) -> Action:
    metrics = {"numOutputRows": rows}
    info = delta_log.commit_info(operation, said, metrics, snapshot.version)
    info["commitInfo"]["userMetadata"] = note(snapshot.version)
    return info
