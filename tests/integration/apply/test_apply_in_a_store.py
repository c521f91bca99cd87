"""Batches written into an object store leave the rows that they leave on a disk, for other readers, too."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars
import pyarrow as pa
import pytest

from fixtures.jobs import until
from fixtures.object_stores import S3Server
from fixtures.store_faults import answering
from fixtures.twins import KEEP_CUTS, Twins, make_twins, normal, on_disk
from headwater import store_options
from headwater.apply import file_keys, whole_table
from headwater.apply.applier import damage_named
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.live_table import LiveTable
from headwater.apply.plan import Applied, ApplyPath, PlanAgain
from headwater.delta import delta_log, storage
from headwater.delta import new_files as partitioned_write
from headwater.delta.data_files import write_batches
from headwater.delta.index.codes import Codes
from headwater.delta.small_tables import open_version
from headwater.errors import ForeignWrite
from headwater.lake.paths import registry_path, staged_path
from headwater.lake.registry import TableRecord
from headwater.log.net.on_disk import PartsOnDisk
from headwater.log.spill import SpillStore
from headwater.net_changes import NetChanges
from headwater.reading.scan import scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@dataclass(frozen=True)
class Pair:
    """Twins on disk, and the table at `place`, which gets what the one of them gets that is written directly."""

    twins: Twins
    place: str
    options: dict[str, str]

    def write(self, changes: NetChanges, path: ApplyPath = "positional") -> tuple[Applied, Applied]:
        """Here and there."""
        here = self.twins.write(changes, path)
        plan = self.twins.plan(self.twins.direct, changes, path)
        there = replace(plan, path=self.place, version=open_version(self.place).version())
        return here, self.twins.applier.commit(there)

    def assert_as_the_model(self) -> None:
        table = {"path": self.place, "version": open_version(self.place).version(), "state": "in step"}
        cut = {"pipeline": "twins", "epoch": 1, "tables": {"public.t": table}}
        expected = self.twins.expected()
        assert sorted(repr(normal(row)) for row in scan(cut, "public.t").read_all().to_pylist()) == expected
        if not self.twins.schema.partition_by:  # Polars 2.1 leaves out the vector of a file whose path is escaped
            by_polars = polars.read_delta(self.place, storage_options=self.options).to_arrow().to_pylist()
            assert sorted(repr(normal(row)) for row in by_polars) == expected


def _pair(
    spark: SparkSession,
    folder: Path,
    server: S3Server,
    kind: str,
    partition_by: tuple[str, ...] = (),
    seed: int | None = None,
) -> Pair:
    """`seed`: of the batches; None: any."""
    seed = random.randrange(1 << 30) if seed is None else seed
    twins = make_twins(spark, folder, kind, seed, partition_by=partition_by)
    place = storage.path_of(server.uri(server.bucket(), "t"))
    store_options.register(place, server.entry)
    whole_table.create(place, twins.schema, KEEP_CUTS)
    return Pair(twins, place, server.options)


@pytest.mark.parametrize(
    ("kind", "partition_by"),
    [("bigint", ()), ("uuid", ()), ("text and date", ("level",)), ("two integers", ("region", "since"))],
    ids=["bigint", "uuid", "text and date by level", "two integers by region and since"],
)
def test_the_same_batches_leave_the_same_rows_and_say_the_same(
    spark: SparkSession, tmp_path: Path, s3_server: S3Server, kind: str, partition_by: tuple[str, ...]
) -> None:
    pair = _pair(spark, tmp_path, s3_server, kind, partition_by)
    for number in range(4):
        changes = pair.twins.batch()
        here, there = pair.write(on_disk(changes, tmp_path, 3) if number == 2 else changes)
        assert (here.divergence, there.divergence, there.gone) == (0, 0, here.gone), (here, there)
        pair.assert_as_the_model()
    pair.twins.model.clear()
    pair.write(replace(pair.twins.batch(), truncated=True), "replace")
    pair.assert_as_the_model()
    here, there = pair.write(pair.twins.batch())
    assert (here.divergence, there.divergence) == (0, 0), "the index knows where the rows are"
    pair.assert_as_the_model()


def test_files_of_a_plan_that_lost_its_race_are_removed_there(
    spark: SparkSession, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioned_write, "_FILE_BYTES", 500)
    pair = _pair(spark, tmp_path, s3_server, "bigint", seed=112)  # whose second batch is more than one file
    pair.write(pair.twins.batch())
    before = sorted(storage.names(pair.place))
    pair.twins.lsn += 1
    plan = pair.twins.plan(pair.twins.direct, on_disk(pair.twins.batch(), tmp_path, 3), "positional")
    plan = replace(plan, path=pair.place, version=open_version(pair.place).version())
    rows = plan.changes.on_disk
    assert rows is not None

    class Overtaken(PartsOnDisk):
        def __iter__(self) -> Iterator[NetChanges]:
            assert rows is not None
            yield from rows
            until(lambda: len(storage.names(pair.place)) > len(before), "some have been written by now")
            nothing = delta_log.commit_info("NOTHING", {}, {}, plan.version)
            delta_log.commit(pair.place, plan.version + 1, [nothing])

    late = replace(plan, changes=replace(plan.changes, on_disk=Overtaken(SpillStore(str(tmp_path), 1))))
    with pytest.raises(PlanAgain):
        pair.twins.applier.commit(late)
    assert sorted(storage.names(pair.place)) == before


def test_keys_that_tasks_read_there_lie_where_they_lie(
    spark: SparkSession, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _pair(spark, tmp_path, s3_server, "uuid", ("level",))
    for _ in range(4):
        pair.write(pair.twins.batch())
    for name, value in (("MANY", 1), ("_OF_A_TASK", 20), ("_OF_A_RUN", 1)):
        monkeypatch.setattr(file_keys, name, value)
    root = pair.place.removesuffix("/t")
    store_options.register(root, s3_server.entry)
    storage.put_if_absent(f"{registry_path(root)}/_delta_log/{0:020}.json", b"{}")  # a task looks whether it is a lake
    taken: list[str] = []
    genuine = file_keys._taken

    def noted(scratch: str, runs: list[str]) -> Iterator[file_keys.Keys]:
        taken.extend(runs)
        return genuine(scratch, runs)

    monkeypatch.setattr(file_keys, "_taken", noted)
    here, by_tasks = (
        LiveTable(pair.place, pair.twins.schema, tasks=tasks) for tasks in (None, FileTasks(lambda: spark, root))
    )
    keys = Codes.joined(list(here.all_keys()))
    assert by_tasks.find(keys).tolist() == here.find(keys).tolist()
    assert len(taken) > 1
    assert storage.names(staged_path(root)) == []


def test_a_missing_file_is_the_tables_trouble_only_where_the_rest_of_the_lake_is_seen(s3_server: S3Server) -> None:
    root = storage.path_of(s3_server.uri(s3_server.bucket(), "lake"))
    folder, rows = f"{root}/public/t", pa.table({"a": [1]})
    record = TableRecord("public.t", "public/t", "active", incarnation=1)
    store_options.register(root, s3_server.entry)
    storage.write(f"{registry_path(root)}/_delta_log/0.json", b"{}")
    file = write_batches(folder, rows.schema, [rows])
    delta_log.create(folder, [delta_log.add(file, data=True)])

    def refused() -> Exception:
        with pytest.raises((OSError, ForeignWrite)) as error, damage_named(record, folder):
            raise FileNotFoundError(errno.ENOENT, "does not exist", file.in_folder(folder))
        return error.value

    assert "a file that is there" in str(refused()), "a proxy said for a moment that it is not"
    with answering(lambda method, target: (404, {}, "default backend - 404")) as (address, _):
        store_options.register(root, s3_server.through(address).entry)
        assert "404 Not Found" in str(refused()), "it says so of everything"
    store_options.register(root, s3_server.entry)
    storage.delete(file.in_folder(folder))
    assert isinstance(refused(), ForeignWrite)
    storage.delete_folder(registry_path(root))
    assert "does not show the lake" in str(refused()), "another store, which has a bucket of this name"
