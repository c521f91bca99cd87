"""A history on disk, without an engine: what is written once stays written once, and what others wrote is noticed."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from fixtures.lakes import HandLake, position_at
from fixtures.waiting import until
from headwater.apply.applier import Applier
from headwater.apply.direct import Fence
from headwater.delta import delta_log
from headwater.errors import ForeignWrite
from headwater.history_columns import history_schema
from headwater.lake.cuts import HISTORY
from headwater.lake.ledger import TableVersion
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Chunk
from headwater.log.net.history_rows import every_change
from headwater.replicate.tables.histories import Histories
from headwater.schema import TableSchema
from unit.log.test_net_effect import Log, Shape, a_row

NAME, SHAPE = "public.t", Shape(("id",))
_TYPES = {"int": "integer", "bigint": "long"}


def no_spark() -> Any:
    raise AssertionError("no engine is needed")


def create(folder: Path, schema: TableSchema) -> None:
    """An empty Delta table, as a load makes it."""

    def type_of(lake: str) -> Any:
        if lake == "array<string>":
            return {"type": "array", "elementType": "string", "containsNull": True}
        return _TYPES.get(lake, lake)

    fields = [{"name": c.name, "type": type_of(c.value.lake), "nullable": True, "metadata": {}} for c in schema.columns]
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {"delta.enableDeletionVectors": "true"},
    }
    actions = [{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}, {"metaData": metadata}]
    log = folder / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020d}.json").write_text("\n".join(map(json.dumps, actions)) + "\n")


@dataclass
class Beside:
    """One driver's hold on the history of one table."""

    lake: HandLake
    record: TableRecord

    @property
    def path(self) -> str:
        return str(Path(self.lake.root) / "public" / f"t{HISTORY}")

    def driver(self, known: dict[str, TableVersion] | None = None) -> Histories:
        histories = Histories("shop", self.lake.root, self.lake.ledger)
        applier = Applier(no_spark, Fence(self.lake.ledger.generation_app, self.lake.ledger.generation))
        histories.resume(applier, self.record)
        if known:
            histories.refuse_damage(self.record, known[NAME + HISTORY])
        return histories

    def append(self, histories: Histories, chunk: Chunk) -> None:
        def rows(own: TableRecord, applied_lsn: int) -> pa.Table | None:
            counts = chunk.transactions.end_lsn > applied_lsn
            if not counts.any():
                return None
            blocks = [(block, counts[chunk.transactions.index_of(block.sequence)]) for block in chunk.blocks]
            cuts = [t for t in chunk.truncates if counts[chunk.transactions.index_of(np.array([t.sequence]))[0]]]
            return every_change(self.record.schema, own.schema, 1, blocks, cuts, chunk.transactions, str)

        histories.append(self.record, rows, int(chunk.transactions.end_lsn[-1]), lambda: None)

    def notes(self) -> list[str]:
        """The notes of its rows, in the log's order."""
        table = QueryBuilder().register("t", DeltaTable(self.path))
        found = table.execute("select note from t order by _hw_lsn, _hw_sequence").read_all()
        return [row["note"] for row in pa.table(found).to_pylist()]


@pytest.fixture
def beside(tmp_path: Path) -> Beside:
    lake = HandLake(tmp_path / "lake", position_at(), [NAME])
    schema = replace(SHAPE.schema, history=True)
    record = TableRecord(NAME, "public/t", "active", incarnation=1, start_lsn=1, schemas=((0, schema),))
    made = Beside(lake, record)
    create(Path(made.path), history_schema(schema))
    return made


def chunk_of(first: int, *notes: str) -> Chunk:
    """A transaction per note; the first of them is number `first` of the log."""
    log = Log(SHAPE, commits=first)
    for number, note in enumerate(notes):
        log.begin()
        log.insert(a_row(id=first + number, note=note))
        log.commit()
    return log.cut()


def test_a_batch_that_overlaps_what_is_written_adds_only_the_rest(beside: Beside) -> None:
    histories = beside.driver()
    beside.append(histories, chunk_of(0, "a", "b"))
    beside.append(histories, chunk_of(0, "a", "b"))
    beside.append(histories, chunk_of(1, "b", "c"))
    assert beside.notes() == ["a", "b", "c"]
    version = histories.versions[NAME + HISTORY]
    assert (version.version, version.applied_lsn, version.rows, version.apply_path) == (2, 3000, 1, "append")
    # Another driver reads from the table where it stands.
    again = beside.driver(dict(histories.versions))
    beside.append(again, chunk_of(0, "a", "b", "c", "d"))
    assert beside.notes() == ["a", "b", "c", "d"]


def test_a_driver_that_lost_the_race_writes_what_the_other_did_not(beside: Beside) -> None:
    late, other = beside.driver(), beside.driver()
    beside.append(other, chunk_of(0, "a"))
    beside.append(late, chunk_of(0, "a", "b"))
    assert beside.notes() == ["a", "b"]


def test_what_somebody_else_wrote_is_noticed_by_the_next_driver_and_by_the_next_commit(beside: Beside) -> None:
    histories = beside.driver()
    beside.append(histories, chunk_of(0, "a"))
    known = dict(histories.versions)
    write_deltalake(beside.path, pa.table({"_hw_operation": ["insert"]}), mode="append", schema_mode="merge")
    for noticed in (partial(beside.driver, dict(known)), partial(beside.append, histories, chunk_of(1, "b"))):
        with pytest.raises(ForeignWrite, match=r"version 2 .* of its history was written by another program"):
            noticed()


def test_a_history_that_is_gone_or_fell_back_is_noticed(beside: Beside) -> None:
    histories = beside.driver()
    beside.append(histories, chunk_of(0, "a", "b"))
    known = {name: replace(v, applied_lsn=v.applied_lsn + 1) for name, v in histories.versions.items()}
    with pytest.raises(ForeignWrite, match="fell back"):
        beside.driver(known)
    Path(beside.path, "_delta_log").rename(Path(beside.path, "elsewhere"))
    with pytest.raises(ForeignWrite, match="its history is gone"):
        beside.driver(dict(histories.versions))


def test_upkeep_makes_few_files_of_many_and_keeps_columns_that_have_come_and_gone(beside: Beside) -> None:
    whole, metadata = beside.record.schema, delta_log.read_snapshot(beside.path).metadata
    stored = [f for f in json.loads(metadata["schemaString"])["fields"] if f["name"] not in ("wide", "big")]
    known: dict[str, TableVersion] = {}
    for phase, (added, missing) in enumerate((("big", "wide"), ("wide", "big"))):
        stored.append({"name": added, "type": "string", "nullable": True, "metadata": {}})
        evolved = {**metadata, "schemaString": json.dumps({"type": "struct", "fields": stored})}
        ours = delta_log.transaction("headwater/shop/generation", 0)
        delta_log.commit(beside.path, DeltaTable(beside.path).version() + 1, [ours, {"metaData": evolved}])
        columns = tuple(column for column in whole.columns if column.name != missing)
        beside.record = replace(beside.record, schemas=((0, replace(whole, columns=columns)),))
        histories = beside.driver(known)
        for number in range(30 * phase, 30 * phase + 30):
            beside.append(histories, chunk_of(number, f"n{number}"))
            histories.keep_up(NAME)

        def rearranged(driver: Histories = histories, times: int = phase + 1) -> bool:
            driver.keep_up(NAME)  # what was rewritten beside the appends may be ready only now
            return [commit["operation"] for commit in DeltaTable(beside.path).history()].count("OPTIMIZE") >= times

        until(rearranged, "files are rearranged")
        known = dict(histories.versions)
    assert beside.notes() == [f"n{number}" for number in range(60)]
    table = DeltaTable(beside.path)
    assert len(table.file_uris()) < 60
    found = QueryBuilder().register("t", table).execute("select big, wide from t order by _hw_lsn").read_all()
    rows = [tuple(row.values()) for row in pa.table(found).to_pylist()]
    assert rows == [("B", None)] * 30 + [(None, "W")] * 30
