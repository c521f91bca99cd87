"""What grows with a table is done by Spark's tasks where the table is large, and comes to the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars
import pyarrow as pa
import pytest

from fixtures.twins import APP, FENCE, Twins, by_delta_rs, make_twins
from headwater.apply import file_keys
from headwater.apply.applier import Applier
from headwater.apply.by_spark import tasks as tasks_module
from headwater.apply.by_spark.optimize import compact_directly
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.columns import ColumnChange, evolve
from headwater.apply.direct import Fence
from headwater.apply.live_table import LiveTable
from headwater.apply.warm_tables import WarmTables
from headwater.arrow_types import key_schema
from headwater.delta import storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.index import index as index_module
from headwater.delta.index.codes import encode
from headwater.delta.index.index import NOWHERE
from headwater.errors import Refused
from headwater.lake.paths import registry_path, staged_path
from headwater.schema import Column, ValueType

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def no_spark() -> Any:
    pytest.fail("Spark was asked for")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A lake in which every table is large."""
    monkeypatch.setattr(tasks_module, "LARGE_BYTES", 0)
    Path(registry_path(str(tmp_path))).mkdir(parents=True)
    return str(tmp_path)


def undo_nothing(_: bytes) -> None:
    pytest.fail("something was undone")


def test_each_item_is_a_task_and_results_come_in_their_order(
    spark: SparkSession, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    items = [f"{number:02x}" for number in range(20)]
    assert FileTasks(lambda: spark, root).map(bytes.fromhex, items, 1, undo_nothing) == [bytes([n]) for n in range(20)]
    assert "since Spark failed" not in caplog.text


@pytest.mark.parametrize("by_spark", [True, False])
def test_an_error_is_what_it_was_and_what_was_made_of_others_is_undone(
    spark: SparkSession, root: str, monkeypatch: pytest.MonkeyPatch, by_spark: bool
) -> None:
    if not by_spark:
        monkeypatch.setattr(tasks_module, "LARGE_BYTES", 1 << 40)
    undone: list[bytes] = []
    with pytest.raises(ValueError, match="non-hexadecimal number found"):
        FileTasks(lambda: spark, root).map(bytes.fromhex, ["00", "no", "04"], 1, undone.append)
    assert undone == ([b"\x00", b"\x04"] if by_spark else [b"\x00"])


def test_where_no_spark_can_be_had_one_thread_does_it(root: str, caplog: pytest.LogCaptureFixture) -> None:
    def refused() -> Any:
        raise Refused("there is no Java here", code="no_java", remedy="install it")

    assert FileTasks(refused, root).map(bytes.fromhex, ["01", "02"], 1, undo_nothing) == [b"\x01", b"\x02"]
    assert "by one thread, since Spark failed: there is no Java here" in caplog.text


def test_what_is_small_asks_for_no_spark(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "LARGE_BYTES", 1000)
    assert FileTasks(no_spark, root).map(bytes.fromhex, ["01", "02"], 999, undo_nothing) == [b"\x01", b"\x02"]


def _both(spark: SparkSession, root: str, **options: Any) -> tuple[Twins, Twins]:
    """The same table twice, in several files with deleted rows."""
    found = []
    for name in ("here", "by Spark"):
        twins = make_twins(spark, Path(root) / name, "bigint", 11, **options)
        for _ in range(6):
            twins.write(twins.batch())
        found.append(twins)
    assert found[0].expected() == found[1].expected()
    return found[0], found[1]


Work = Callable[[Twins, FileTasks], None]


def _add_with_default(twins: Twins, tasks: FileTasks) -> None:
    more = Column("more", 99, 23, -1, ValueType("int4", "int"))
    schema = replace(twins.schema, columns=(*twins.schema.columns, more))
    to = ColumnChange(schema, (more,), {"small": "smaller"}, {"more": pa.array([7], pa.int32())}, number=2)
    folder = str(twins.direct)
    evolve(folder, read_snapshot(folder).version, "public.t", APP, to, Fence(FENCE, 1), tasks)


def _compact(twins: Twins, tasks: FileTasks) -> None:
    assert compact_directly(str(twins.direct), twins.schema, FENCE, tasks)


@pytest.mark.parametrize("work", [_add_with_default, _compact])
@pytest.mark.parametrize("options", [{}, {"partition_by": ("level",)}, {"cluster_by": ("level",)}], ids=str)
def test_both_ways_give_the_same_table(
    spark: SparkSession,
    root: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    work: Work,
    options: dict[str, Any],
) -> None:
    here, by_spark = _both(spark, root, **options)
    asked: list[int] = []
    by_tasks = FileTasks._by_spark

    def noted(self: FileTasks, each: Any, items: Any, can_wait: bool) -> list[Any] | None:
        asked.append(len(items))
        return by_tasks(self, each, items, can_wait)

    monkeypatch.setattr(FileTasks, "_by_spark", noted)
    work(by_spark, FileTasks(lambda: spark, root))
    assert "since Spark failed" not in caplog.text
    if work is _add_with_default or "partition_by" in options:  # else all files are one group
        assert max(asked) > 1
    monkeypatch.setattr(tasks_module, "LARGE_BYTES", 1 << 40)
    before = len(asked)
    work(here, FileTasks(no_spark, root))
    assert len(asked) == before
    assert by_delta_rs(here.direct) == by_delta_rs(by_spark.direct)
    both = [read_snapshot(str(twins.direct)) for twins in (here, by_spark)]
    assert both[0].version == both[1].version
    assert len(both[0].files) == len(both[1].files)
    rows = [sorted(repr((file.rows, file.partition_values)) for file in one.files.values()) for one in both]
    assert rows[0] == rows[1]
    for twins in (here, by_spark):
        twins.applier.forget(str(twins.direct))
        twins.applier.close()


def _filled(spark: SparkSession, root: str, kind: str, **options: Any) -> Twins:
    """A table in several files with deleted rows, all of whose keys are about to be read."""
    twins = make_twins(spark, Path(root) / kind.replace(" ", "_"), kind, 12, **options)
    for _ in range(6):
        twins.write(twins.batch())
    return twins


def _places(twins: Twins, tasks: FileTasks | None) -> tuple[list[int], int]:
    """Where each key of the table lies, and how many entries the index has."""
    table = LiveTable(str(twins.direct), twins.schema, tasks=tasks)
    table.index_keys()
    keys = _lake_keys(twins)
    found = table.find(encode(twins.schema, keys)).tolist()
    entries = len(table._index)
    table.close()
    assert NOWHERE not in found
    return found, entries


def _lake_keys(twins: Twins) -> pa.Table:
    keys = polars.read_delta(str(twins.direct), columns=list(twins.schema.key))
    return keys.to_arrow().cast(key_schema(twins.schema))


class Counting(FileTasks):
    """Notes how many tasks there were."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: list[int] = []

    def by_tasks_alone(self, work: Any, items: Any) -> Any:
        self.asked.append(len(items))
        return super().by_tasks_alone(work, items)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table has many keys, for several tasks that leave several runs each; the index has its runs on disk."""
    monkeypatch.setattr(file_keys, "MANY", 1)
    monkeypatch.setattr(file_keys, "_OF_A_TASK", 40)
    monkeypatch.setattr(file_keys, "_OF_A_RUN", 1)
    monkeypatch.setattr(index_module, "_ON_DISK_ABOVE", 16)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("kind", ["bigint", "two integers", "uuid", "text and date"])
def test_keys_that_tasks_read_lie_where_they_lie(
    spark: SparkSession, root: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    twins = _filled(spark, root, kind, partition_by=("level",))
    tasks = Counting(lambda: spark, root)
    assert _places(twins, tasks) == _places(twins, None)
    assert tasks.asked[0] > 1
    assert "by one thread" not in caplog.text
    assert storage.names(staged_path(root)) == []


@pytest.mark.usefixtures("many")
def test_where_tasks_cannot_read_keys_or_what_they_read_is_gone_one_thread_reads_them(
    spark: SparkSession, root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    twins = _filled(spark, root, "uuid")
    here = _places(twins, None)

    def refused() -> Any:
        raise Refused("there is no Java here", code="no_java", remedy="install it")

    assert _places(twins, FileTasks(refused, root)) == here
    assert "by one thread, since Spark failed: there is no Java here" in caplog.text

    def swept(scratch: str, runs: list[str]) -> Any:
        assert len(runs) > 1
        storage.delete(f"{scratch}/{runs[1]}")
        return taken(scratch, runs)

    taken = file_keys._taken
    monkeypatch.setattr(file_keys, "_taken", swept)
    assert _places(twins, FileTasks(lambda: spark, root)) == here
    assert "by one thread, since what tasks read is gone" in caplog.text
    assert storage.names(staged_path(root)) == []


@pytest.mark.usefixtures("many")
def test_a_data_file_that_tasks_cannot_read_is_named_as_ever(spark: SparkSession, root: str) -> None:
    twins = _filled(spark, root, "bigint", partition_by=("level",))
    lost = next(iter(read_snapshot(str(twins.direct)).files.values()))
    storage.delete(lost.in_folder(str(twins.direct)))
    with pytest.raises(FileNotFoundError, match=lost.name):
        LiveTable(str(twins.direct), twins.schema, tasks=FileTasks(lambda: spark, root)).index_keys()
    assert storage.names(staged_path(root)) == []


def _slow(done: str) -> None:
    time.sleep(30)
    Path(done).touch()


def test_where_no_core_is_free_one_thread_does_it_and_a_thread_that_is_stopped_waits_for_none(
    spark: SparkSession, root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks_module, "_has_begun", lambda *_: False)
    monkeypatch.setattr(tasks_module, "_LOOK_EVERY", 0.05)
    monkeypatch.setattr(tasks_module, "_LONGEST_WAIT", 0.2)
    done = [f"{root}/{number}" for number in range(2)]
    assert FileTasks(lambda: spark, root).by_tasks_alone(_slow, done) is None
    assert "by one thread, since Spark failed: the cluster had no free core for 0 s" in caplog.text
    monkeypatch.setattr(tasks_module, "_LONGEST_WAIT", 1e9)
    stopped = threading.Event()
    threading.Timer(0.5, stopped.set).start()
    with pytest.raises(InterruptedError):
        FileTasks(lambda: spark, root, stopped.is_set).by_tasks_alone(_slow, done)
    assert not any(Path(each).exists() for each in done)
    # What this thread starts afterwards is of no group that was given up.
    assert spark.sparkContext.parallelize([1, 2], 2).sum() == 3


def test_what_is_too_large_for_one_thread_waits_and_raises_what_spark_fails_with(
    spark: SparkSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "_has_begun", lambda *_: False)
    monkeypatch.setattr(tasks_module, "_LOOK_EVERY", 0.05)
    monkeypatch.setattr(tasks_module, "_LONGEST_WAIT", 0.0)
    patient = FileTasks(lambda: spark, root, most_here=1)
    assert patient.map(bytes.fromhex, ["01"], 2, undo_nothing) == [b"\x01"]

    def refused() -> Any:
        raise Refused("there is no Java here", code="no_java", remedy="install it")

    with pytest.raises(Refused, match="there is no Java here"):
        FileTasks(refused, root, most_here=1).map(bytes.fromhex, ["01", "02"], 2, undo_nothing)
    assert FileTasks(refused, root, most_here=2).map(bytes.fromhex, ["01", "02"], 2, undo_nothing) == [b"\x01", b"\x02"]


@pytest.mark.usefixtures("many")
def test_a_driver_and_its_successor_let_tasks_read_the_keys(spark: SparkSession, root: str) -> None:
    twins = _filled(spark, root, "uuid", partition_by=("level",))
    path = str(twins.direct)
    ended = threading.Event()
    ahead, behind = Counting(lambda: spark, root, ended.is_set), Counting(lambda: spark, root)
    warm = WarmTables(ahead)
    assert warm.follow(twins.record, path, APP) == ""
    assert len(ahead.asked) == 1
    twins.applier.close()
    # The thread that has read ahead ends; what it has read is gone on with.
    ended.set()
    states = warm.take_states()
    twins.applier = Applier(no_spark, Fence(FENCE, 1), states, behind)
    assert twins.write(twins.batch()).divergence == 0
    assert behind.asked == []
    states[path]._forget()
    assert twins.write(twins.batch()).divergence == 0
    assert len(behind.asked) == 1
    assert len(ahead.asked) == 1


def test_few_keys_ask_for_no_spark(spark: SparkSession, root: str) -> None:
    twins = _filled(spark, root, "bigint")
    LiveTable(str(twins.direct), twins.schema, tasks=FileTasks(no_spark, root)).index_keys()
