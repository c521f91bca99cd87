"""What grows with a table is done by Spark's tasks where the table is large, and comes to the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from fixtures.twins import APP, FENCE, Twins, by_delta_rs, make_twins
from headwater.apply.by_spark import tasks as tasks_module
from headwater.apply.by_spark.optimize import compact_directly
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.columns import ColumnChange, evolve
from headwater.apply.direct import Fence
from headwater.delta.delta_log import read_snapshot
from headwater.errors import Refused
from headwater.lake.paths import registry_path
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

    def noted(self: FileTasks, each: Any, items: Any) -> list[Any]:
        asked.append(len(items))
        return by_tasks(self, each, items)

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
