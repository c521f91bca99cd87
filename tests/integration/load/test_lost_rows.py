"""Files that a session is told to skip where they are damaged or missing: what Spark lays out is counted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from headwater.apply import whole_table
from headwater.arrow_types import lake_schema
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.delta.new_files import write_rows
from headwater.delta.small_versions import TableUnreadable
from headwater.delta.spark_rows import rows_of_table
from headwater.errors import Transient
from headwater.lake.executors import LakeAccess
from headwater.lake.paths import registry_path
from headwater.load.ordering import TableFiles
from headwater.reload.row_folder import ReloadFiles
from headwater.schema import Column, TableSchema, ValueType
from headwater.spark.session import for_thread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SKIPPED = "spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles"
COLUMNS = Column("id", 1, 0, -1, ValueType("int8", "bigint")), Column("v", 2, 0, -1, ValueType("text", "string"))
SCHEMA = TableSchema(1, "public", "t", COLUMNS, ("id",), cluster_by=("v",))
KIND = lake_schema(SCHEMA)


@pytest.fixture
def skipping(spark: SparkSession) -> SparkSession:
    session = spark.newSession()
    for name in SKIPPED:
        session.conf.set(name, "true")
    return session


@pytest.fixture
def table(tmp_path: Path) -> Snapshot:
    Path(registry_path(str(tmp_path))).mkdir(parents=True)
    folder = str(tmp_path / "public" / "t")
    whole_table.create(folder, SCHEMA, 3600.0)
    return read_snapshot(folder)


def rows(first: int) -> pa.Table:
    return pa.table({"id": range(first, first + 1000), "v": [str(at * 7919 % 1000) for at in range(1000)]}, schema=KIND)


def of_table(root: Path, snapshot: Snapshot) -> TableFiles:
    layout = whole_table.layout_for(snapshot, SCHEMA)
    return TableFiles(snapshot.folder, SCHEMA, layout, LakeAccess.to(str(root)))


def test_headwaters_own_sessions_skip_no_file(skipping: SparkSession) -> None:
    for name in SKIPPED:
        assert for_thread(skipping).conf.get(name) == "false"


def test_rows_that_were_read_and_are_not_found_again_end_the_load(
    skipping: SparkSession, tmp_path: Path, table: Snapshot
) -> None:
    into = of_table(tmp_path, table)
    files = [file for first in (0, 1000) for file in _written(into, first)]
    lost = Path(files[0].in_folder(table.folder))
    lost.write_bytes(lost.read_bytes()[: lost.stat().st_size // 2])
    with pytest.raises(Transient, match="2000 rows were read and 1000 of them found again") as caught:
        into.lay_out(skipping, files)
    assert (caught.value.code, caught.value.where) == ("rows_lost", "public.t")
    left = {str(path) for path in Path(table.folder).glob("*.parquet")}
    assert left == {file.in_folder(table.folder) for file in files}


def test_a_rebuild_whose_table_has_lost_rows_gives_nothing_to_the_driver(
    skipping: SparkSession, tmp_path: Path, table: Snapshot
) -> None:
    whole_table.overwrite(table.folder, SCHEMA, rows(0).to_batches(), "app", 1)
    snapshot = read_snapshot(table.folder)
    for file in snapshot.files.values():
        Path(file.in_folder(table.folder)).unlink()
    waiting = ReloadFiles(str(tmp_path), "abc", of_table(tmp_path, snapshot))
    with pytest.raises(TableUnreadable, match="it has 1000 rows, and 0 were found"):
        waiting.put_again(rows_of_table(skipping, table.folder, snapshot.version), 1000, 1 << 20, is_exact=True)


def _written(into: TableFiles, first: int) -> list[DataFile]:
    return [one.file for one in write_rows(into.folder, KIND, iter([rows(first)]), into.layout)]
