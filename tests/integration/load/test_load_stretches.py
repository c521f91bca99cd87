"""What an attempt at a load has written serves the next one where the source has not changed since; nowhere else."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from fixtures.jobs import (
    Job,
    armed,
    assert_equal,
    catch_up,
    files_below,
    following,
    in_thread,
    lake_path_of,
    load_tables,
    record_of,
)
from fixtures.loaded import loaded_pipeline
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater import failpoints
from headwater.delta import storage
from headwater.delta.delta_log import read_snapshot
from headwater.errors import Transient
from headwater.failpoints import InjectedFailure
from headwater.lake.paths import stretches_path
from headwater.load import copy as table_copy
from headwater.load import one_table as table_load
from headwater.load import stretches, units
from headwater.load.copy import CopyTarget, NotAtThisCapturePoint, copy_whole
from headwater.load.load import load
from headwater.load.stretch_notes import StretchNote, StretchNotes
from headwater.pipeline_file.pipeline import Pipeline
from headwater.spark.session import SparkOnDemand

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

TABLE = "public.t"
PER_PAGE = 7
ROWS = 24 * PER_PAGE
"""In six stretches of four pages."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "PAGES_PER_UNIT", 2)
    monkeypatch.setattr(stretches, "UNITS_PER_STRETCH", 2)
    for module in (table_copy, table_load):
        monkeypatch.setattr(module, "BYTES_PER_PLAIN_UNIT", 2 * 8192)


def _table(database: Database, folder: Path, **options: bool) -> Pipeline:
    database.allow_publishing()
    database.execute(
        f"create table {TABLE} (id int primary key, note text not null) with (autovacuum_enabled = off)",
        f"insert into {TABLE} select i, repeat(chr(97 + i % 26), 1000) from generate_series(0, {ROWS - 1}) i",
    )
    assert database.query(f"select max((ctid::text::point)[0])::int from {TABLE}") == [(23,)]
    return write_pipeline(folder, database, {"name": TABLE, **options})


def _fail(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, point: str, *, again: bool = False) -> None:
    failpoints._reached.clear()
    monkeypatch.setenv("HEADWATER_FAILPOINT", f"{point}=fail")
    with pytest.raises(InjectedFailure):
        load_tables(pipeline, again=again)
    monkeypatch.delenv("HEADWATER_FAILPOINT")


def _live(pipeline: Pipeline) -> set[str]:
    return set(read_snapshot(lake_path_of(pipeline, TABLE)).files)


def _written(pipeline: Pipeline) -> set[str]:
    return {name for name in files_below(lake_path_of(pipeline, TABLE)) if re.fullmatch(r"[^/]*\.parquet", name)}


def _assert_all_taken_over(database: Database, pipeline: Pipeline) -> None:
    """The lake is the source's, and nothing is left of what was written in vain."""
    assert _written(pipeline) == _live(pipeline)
    assert storage.names(stretches_path(pipeline.lake_path(), record_of(pipeline, TABLE).path)) == []
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("soft_delete", [False, True])
def test_only_what_changed_at_the_source_is_read_again(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soft_delete: bool
) -> None:
    pipeline = _table(database, tmp_path, soft_delete=soft_delete)
    _fail(pipeline, monkeypatch, "load.after_stretches")
    before = _written(pipeline)
    assert len(before) == 6
    database.execute(
        f"update {TABLE} set note = 'x' where id = 1",  # in the first stretch
        f"delete from {TABLE} where id = {9 * PER_PAGE}",  # in the third one
        f"insert into {TABLE} values (1000, 'new')",  # at the end
        f"vacuum {TABLE}",
    )
    assert load_tables(pipeline)["tables"][TABLE]["rows"] == ROWS
    assert len(_live(pipeline)) == 6
    assert len(_live(pipeline) & before) == 3
    _assert_all_taken_over(database, pipeline)


@pytest.mark.usefixtures("small")
def test_the_next_attempt_of_the_same_command_goes_on_with_what_was_read(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = _table(database, tmp_path)
    with armed(tmp_path, "load.after_stretches") as hold:
        job = in_thread(lambda: load_tables(pipeline))
        hold.reached(job)
        before = _written(pipeline)
        row = pa.table({"id": pa.array([-1], pa.int32()), "note": ["somebody else's"]})
        write_deltalake(lake_path_of(pipeline, TABLE), row, mode="append")
        hold.release()
    assert job.result(120)["tables"][TABLE]["state"] == "catching up"
    assert record_of(pipeline, TABLE).incarnation == 2
    assert _live(pipeline) == before
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE)


@pytest.mark.usefixtures("small")
def test_attempts_that_come_further_do_not_count(database: Database, spark: SparkSession, tmp_path: Path) -> None:
    pipeline = _table(database, tmp_path)
    reached = iter([1, 2, 3, 4, 5])

    def copy(spark: SparkOnDemand, target: CopyTarget) -> tuple[int, int]:
        stretches_read = next(reached, None)
        if stretches_read is None:
            return copy_whole(spark, target)
        notes = StretchNotes(pipeline.lake_path(), pipeline.name, target.record)
        for first in range(stretches_read):
            notes.write(StretchNote(0, first, first + 1, "", 1, 1, 0, 0, ()))
        raise NotAtThisCapturePoint("its snapshot is gone")

    lines: list[str] = []
    assert load(pipeline, progress=lines.append, copy=copy)["tables"][TABLE]["state"] == "catching up"
    assert record_of(pipeline, TABLE).incarnation == 6
    _assert_all_taken_over(database, pipeline)


@pytest.mark.usefixtures("small")
def test_nothing_is_taken_from_a_load_that_has_committed(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = _table(database, tmp_path)
    _fail(pipeline, monkeypatch, "load.after_commit")
    before = _live(pipeline)
    load_tables(pipeline)
    assert not _live(pipeline) & before
    assert before <= _written(pipeline), "an older version needs them"
    assert storage.names(stretches_path(pipeline.lake_path(), record_of(pipeline, TABLE).path)) == []
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE)


@pytest.mark.usefixtures("small")
def test_what_a_load_took_over_and_committed_is_not_taken_once_more(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notes of the first load stay where the second one dies behind its commit."""
    pipeline = _table(database, tmp_path)
    _fail(pipeline, monkeypatch, "load.after_stretches")
    first = _written(pipeline)
    _fail(pipeline, monkeypatch, "load.after_commit")
    before = _live(pipeline)
    assert first & before, "the second load has taken over what the first had written"
    load_tables(pipeline)
    assert not _live(pipeline) & before
    assert before <= _written(pipeline), "an older version needs them"
    assert storage.names(stretches_path(pipeline.lake_path(), record_of(pipeline, TABLE).path)) == []
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("statement", ["vacuum full {}", "alter table {} alter note type varchar(2000)"])
def test_nothing_is_taken_over_from_before_a_rewrite_or_another_definition(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    pipeline = _table(database, tmp_path)
    _fail(pipeline, monkeypatch, "load.after_stretches")
    before = _written(pipeline)
    database.execute(statement.format(TABLE))
    load_tables(pipeline)
    assert not _live(pipeline) & before
    _assert_all_taken_over(database, pipeline)


def test_a_load_that_was_killed_beside_a_driver_goes_on_and_is_exact(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute(
        f"create table {TABLE} (id int primary key, note text not null)",
        "create table other (id int primary key)",
        f"alter table {TABLE} alter note set storage plain",
        f"insert into {TABLE} select i, repeat(md5(i::text), 230) from generate_series(1, 9000) i",
    )
    first = loaded_pipeline(tmp_path, database, "public.other")
    with following(first):
        pipeline = write_pipeline(tmp_path, database, "public.other", TABLE)
        with Job(pipeline, "load", failpoint="load.after_stretches=kill", spark=spark) as job:
            assert job.wait() == -signal.SIGKILL, job.log[-3000:]
        before = _written(pipeline)
        assert len(before) > 1
        # Moved to the end, where new ones go as well.
        database.execute(
            f"update {TABLE} set note = 'x' || note where id > 8990", f"insert into {TABLE} values (0, 'new')"
        )
        load_tables(pipeline)
        assert _live(pipeline) & before
        assert not before <= _live(pipeline)
        database.execute(f"update {TABLE} set note = 'last' where id in (0, 1, 9000)")
    _assert_all_taken_over(database, pipeline)


def test_a_vacuum_by_hand_that_takes_files_of_a_load_ends_it_and_nothing_is_committed(
    database: Database, spark: SparkSession, tmp_path: Path, small: None
) -> None:
    pipeline = _table(database, tmp_path)
    path = lake_path_of(pipeline, TABLE)
    with armed(tmp_path, "load.after_stretches") as hold:
        loading = in_thread(lambda: load_tables(pipeline))
        hold.reached(loading)
        removed = DeltaTable(path).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)
        assert removed
        hold.release()
        with pytest.raises(Transient, match="are gone from the lake, as by a VACUUM") as failed:
            loading.result(60)
    assert failed.value.code == "files_gone"
    assert read_snapshot(path).files == {}
    load_tables(pipeline)
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE)
