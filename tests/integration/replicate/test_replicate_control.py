"""What stops replicate, and what suspends one table while the others go on, each with a remedy that exists.

One source and one lake for the whole file: everything that can go wrong with a table goes wrong with a table of its
own, replicate runs over all of it once, and the tests look at what came of it. Refusals at the start need no Spark:
there the lake's control files are made by hand.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from fixtures.jobs import (
    Job,
    Outcome,
    Rows,
    armed,
    assert_equal,
    catch_up,
    failing,
    following,
    lake_path_of,
    lake_rows,
    load_tables,
    record_of,
    registry_of,
    source_rows,
    states_of,
    until,
)
from fixtures.lake_waits import wait
from fixtures.lakes import HandLake
from fixtures.loaded import loaded_pipeline, pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.errors import LostLease, Refused, SlotGap, SourceChanged, Transient
from headwater.lake import freshness
from headwater.lake.ledger import Epoch, read_all
from headwater.lake.position_file import PositionFile, read_position_file
from headwater.monitor.recent_epochs import RecentEpochs
from headwater.monitor.status import status
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.position import Position, format_lsn, parse_lsn
from headwater.replicate import sampler
from headwater.replicate.replicate import replicate
from headwater.source.connection import connect, identify
from headwater.source.samples import commit_position
from headwater.source.slot import read_slot
from headwater.source.stream import LogStream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

HEALTHY = (
    "public.orders",
    "public.optimized",
    "public.repaired",
    "public.reported",
    "public.nulled",
    "public.texts",
    "public.fresh",
    "public.added",
)
SUSPENDED = {
    "public.appended": ("was written by another program",),
    "public.renamed": ("renamed to public.renamed_now",),
    "public.recreated": ("dropped and created again",),
    "public.retyped": ("other types: n",),
    "public.nans": ("column amount holds a value that the lake's type decimal(5,2) cannot hold",),
    "public.parted": ("column note holds a value that the lake's type string cannot hold",),
    "public.contradicted": ("update met no row at key (1000)", "insert met a row at key (1)"),
    "public.rejoined": ("it left the publication headwater_shop and came back",),
}
WITH_VALUES = ("public.nans", "public.nulled", "public.texts")


@dataclass(frozen=True)
class Shop(Outcome):
    """What replicate made of the harm, as it stood then: tests run in any order, and some go on from here."""

    source: dict[str, Rows]
    lake: dict[str, Rows]
    newest: Epoch

    def now(self) -> Pipeline:
        """The pipeline as its file says now."""
        return load_pipeline(self.pipeline.file)


@pytest.fixture(scope="module")
def shop(shared_database: Database, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Loaded, followed once, harmed in every way, and replicated over that."""
    database = shared_database
    plain = [name for name in (*HEALTHY, *SUSPENDED) if name not in WITH_VALUES]
    database.execute(
        *(f"create table {name} (id int primary key, n int, note text)" for name in plain),
        *(f"insert into {name} select i, i, 'row ' || i from generate_series(1, 20) i" for name in plain),
        *(f"create table {name} (id int primary key, amount numeric(5,2), at timestamptz)" for name in WITH_VALUES),
        *(f"insert into {name} select i, i, '2024-02-29' from generate_series(1, 3) i" for name in WITH_VALUES),
    )
    options: dict[str, dict[str, Any]] = {
        "public.parted": {"partition_by": ["note"]},
        "public.repaired": {"on_divergence": "repair"},
        "public.reported": {"on_divergence": "report"},
        "public.nulled": {"on_bad_value": "null"},
        "public.texts": {"on_bad_value": "string"},
    }
    entries = [{"name": name, **options[name]} if name in options else name for name in (*HEALTHY, *SUSPENDED)]
    pipeline = loaded_pipeline(tmp_path_factory.mktemp("shop"), database, *entries)
    database.execute(*(f"update {name} set n = n + 100 where id < 4" for name in plain))
    assert set(states_of(catch_up(pipeline)).values()) == {"active"}
    _harm(database, pipeline, spark)
    result = catch_up(pipeline)
    names = [name for name in (*HEALTHY, *SUSPENDED) if name != "public.renamed"]
    return Shop(
        database,
        pipeline,
        result,
        dict(registry_of(pipeline).tables),
        {name: source_rows(database, name)[1] for name in names if name not in WITH_VALUES},
        {name: lake_rows(pipeline, name) for name in names},
        read_all(pipeline.lake_path())[-1],
    )


FOREIGN = pa.table({"id": pa.array([99], pa.int32()), "n": pa.array([1], pa.int32()), "note": ["foreign"]})


def _harm(database: Database, pipeline: Pipeline, spark: SparkSession) -> None:
    write_deltalake(lake_path_of(pipeline, "public.appended"), FOREIGN, mode="append")
    spark.sql(f"optimize delta.`{lake_path_of(pipeline, 'public.optimized')}`")
    database.execute(
        "alter table renamed rename to renamed_now",
        "drop table recreated",
        "create table recreated (id int primary key, n int, note text)",
        "alter table added add column extra int default 5",
        "alter table retyped alter column n type text",
        "insert into nans values (50, 'NaN', now())",
        "insert into parted values (50, 1, '')",  # Delta would make it NULL
        "insert into nulled values (50, 'NaN', '-infinity')",
        "insert into texts values (50, 'NaN', 'infinity')",
    )
    with database.superuser() as connection:
        publication = pipeline.source.publication
        connection.execute(f"alter publication {publication} add table recreated")
        # What an unpublished table does not tell: a row gone and a row come, of which the lake knows nothing.
        for name in ("contradicted", "repaired", "reported", "rejoined"):
            connection.execute(f"alter publication {publication} drop table {name}")
            connection.execute(f"insert into {name} values (1000, 1, 'untold'), (1001, 1, 'untold')")
            connection.execute(f"delete from {name} where id = 1")
            connection.execute(f"alter publication {publication} add table {name}")
    # That alone suspends a table at once; where the log itself is to tell, nobody knows of it.
    registry = registry_of(pipeline)
    for name in ("public.contradicted", "public.repaired", "public.reported"):
        registry.write(replace(registry.record(name), membership=None))
    database.execute(
        *(
            # One transaction, so one batch: a table is suspended by the first that contradicts.
            f"update {name} set n = 5 where id = 1000; delete from {name} where id = 1001; "
            f"insert into {name} values (1, 1, 'came back')"
            for name in ("contradicted", "repaired", "reported")
        ),
        *(
            f"update {name} set note = 'after' where id between 5 and 8"
            for name in ("appended", "optimized", "renamed_now", "added", "retyped", "rejoined", "orders")
        ),
        "insert into recreated values (1, 1, 'second life')",
    )


def test_a_table_fails_alone(shop: Shop) -> None:
    states = states_of(shop.result)
    assert {name for name, state in states.items() if state == "suspended"} == set(SUSPENDED)
    assert {name for name, state in states.items() if state == "active"} == set(HEALTHY)
    assert shop.result["stopped_by"] == "until"


@pytest.mark.parametrize("name", SUSPENDED)
def test_a_suspended_table_says_why_and_names_a_remedy(shop: Shop, name: str) -> None:
    record = shop.records[name]
    for reason in SUSPENDED[name]:
        assert reason in record.reason
    if name == "public.renamed":
        assert "name public.renamed_now in the pipeline file" in record.remedy
    elif name in ("public.nans", "public.parted"):
        assert "on_bad_value" in record.remedy
    else:
        assert record.remedy == f"headwater load PIPELINE.yaml --table {name} --again"


def test_nothing_is_applied_on_top_of_a_foreign_commit(shop: Shop) -> None:
    rows = shop.lake["public.appended"]
    assert (99, 1, "foreign") in rows
    assert not [row for row in rows if row[2] == "after"]


def test_files_rearranged_by_somebody_else_are_accepted(shop: Shop) -> None:
    for name in ("public.orders", "public.optimized"):
        assert shop.lake[name] == shop.source[name]
    assert [row for row in shop.lake["public.optimized"] if row[2] == "after"]


def test_divergence_is_repaired_by_the_rows_of_the_log_on_request(shop: Shop) -> None:
    assert shop.lake["public.repaired"] == shop.source["public.repaired"]
    assert "diverged (repair)" in shop.records["public.repaired"].reason


def test_divergence_that_is_only_reported_changes_no_row_that_contradicts_the_log(shop: Shop) -> None:
    rows = shop.lake["public.reported"]
    assert (1, 101, "row 1") in rows
    assert not [row for row in rows if row[0] in (1000, 1001)]
    assert "diverged (report)" in shop.records["public.reported"].reason


def test_a_value_that_the_lake_cannot_hold_is_null_or_text_on_request(shop: Shop) -> None:
    assert (50, None, None) in shop.lake["public.nulled"]
    assert (50, "NaN", "infinity") in shop.lake["public.texts"]
    assert (1, "1.00", "2024-02-29 00:00:00+00") in shop.lake["public.texts"]


def test_cuts_hold_suspended_tables_as_they_were_and_say_so(shop: Shop) -> None:
    assert {name for name, version in shop.newest.tables.items() if version.state == "suspended"} == set(SUSPENDED)


def test_every_remedy_cures(shop: Shop) -> None:
    text = Path(shop.pipeline.file).read_text()
    text = text.replace("- public.renamed\n", "- public.renamed_now\n")
    text = text.replace("- public.nans\n", "- {name: public.nans, on_bad_value: string}\n")
    Path(shop.pipeline.file).write_text(text)
    shop.database.execute("update parted set note = 'named' where id = 50")
    pipeline = shop.now()
    load_tables(pipeline)  # the renamed table under its new name; loaded ones, suspended ones too, are skipped
    for name in SUSPENDED:
        if name != "public.renamed":
            assert states_of(load_tables(pipeline, name, again=True)) == {name: "catching up"}
    catch_up(pipeline)
    cured = [name for name in SUSPENDED if name not in ("public.renamed", "public.nans")]
    assert_equal(shop.database, pipeline, *cured, "public.renamed_now")
    assert (50, "NaN") in lake_rows(pipeline, "public.nans", ["id", "amount"])


def test_a_foreign_commit_between_load_and_the_first_replicate_suspends(shop: Shop) -> None:
    pipeline = shop.now()
    load_tables(pipeline, "public.fresh", again=True)
    write_deltalake(lake_path_of(pipeline, "public.fresh"), FOREIGN, mode="append")
    shop.database.execute("update fresh set n = 7 where id = 3")
    assert states_of(catch_up(pipeline))["public.fresh"] == "suspended"
    assert "written by another program" in record_of(pipeline, "public.fresh").reason
    assert (3, 7, "row 3") not in lake_rows(pipeline, "public.fresh")


def test_a_foreign_commit_while_replicate_runs_suspends_before_anything_is_applied_on_top(shop: Shop) -> None:
    pipeline = shop.now()
    generation = read_all(pipeline.lake_path())[-1].generation
    with following(pipeline) as running:
        until(lambda: _generation(pipeline) > generation or running.done(), "replicate runs")
        shop.database.execute("update orders set n = 1 where id = 1", "update optimized set n = 1 where id = 1")
        until(lambda: _source_equals(shop, pipeline, "public.optimized") or running.done(), "the first change has come")
        write_deltalake(lake_path_of(pipeline, "public.optimized"), FOREIGN, mode="append")
        shop.database.execute("update optimized set n = 2 where id = 1", "update orders set n = 2 where id = 1")
        until(lambda: record_of(pipeline, "public.optimized").state == "suspended" or running.done(), "it is suspended")
        until(lambda: _source_equals(shop, pipeline, "public.orders") or running.done(), "the other table goes on")
    assert running.result()["stopped_by"] == "signal"
    assert (1, 1, "row 1") in lake_rows(pipeline, "public.optimized")


def _generation(pipeline: Pipeline) -> int:
    file = read_position_file(pipeline.lake_path())
    return file.generation if file is not None else 0


def _source_equals(shop: Shop, pipeline: Pipeline, name: str) -> bool:
    columns, rows = source_rows(shop.database, name)
    return lake_rows(pipeline, name, columns) == rows


def test_until_an_lsn_ends_there_and_seconds_end_in_time(shop: Shop) -> None:
    pipeline = shop.now()
    with shop.database.connect() as connection:
        connection.execute("update orders set n = 3 where id = 1")
        target = commit_position(connection)
        connection.execute("update orders set n = 4 where id = 1")
    result = replicate(pipeline, format_lsn(target.lsn), None, threading.Event())
    assert result["stopped_by"] == "until"
    assert parse_lsn(result["position"]["lsn"]) >= target.lsn
    assert replicate(pipeline, None, 0.5, threading.Event())["stopped_by"] == "seconds"
    assert_equal(shop.database, pipeline, "public.orders")


def test_a_loaded_table_is_left_alone_by_another_load(shop: Shop) -> None:
    pipeline = shop.now()
    before = record_of(pipeline, "public.orders")
    assert states_of(load_tables(pipeline, "public.orders")) == {"public.orders": "active"}
    assert record_of(pipeline, "public.orders") == before


def test_sigterm_is_a_clean_stop_and_a_second_replicate_ends_at_once(shop: Shop, spark: SparkSession) -> None:
    pipeline = shop.now()
    generation = _generation(pipeline)
    with Job(pipeline, "replicate", spark=spark, as_users_do=True) as job:
        until(lambda: _generation(pipeline) > generation or job.process.poll() is not None, "it publishes")
        shop.database.execute("update orders set n = 9 where id = 9")
        until(lambda: _source_equals(shop, pipeline, "public.orders"), "the change has come")
        with pytest.raises(LostLease) as refused:
            catch_up(pipeline)
        assert (refused.value.code, refused.value.exit_status) == ("already_running", 1)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == (4 if "suspended" in states_of(job.result).values() else 0)
        assert job.result["stopped_by"] == "signal"
        assert parse_lsn(job.result["position"]["lsn"]) == read_all(pipeline.lake_path())[-1].position.lsn
        # The interpreter's own helper sees a moment later that it is not needed any more.
        until(lambda: not job.left, f"what the job had started has ended: {job.left}")


# Refusals at the start: the lake's control files are made by hand, and nothing gets as far as Spark.


@pytest.fixture
def by_hand(database: Database, tmp_path: Path) -> tuple[Pipeline, HandLake]:
    """A pipeline whose slot stands where the ledger does."""
    database.execute("create table orders (id int primary key)")
    database.publish("headwater_shop", "orders")
    pipeline = write_pipeline(tmp_path, database, "public.orders")
    with connect(database.conninfo) as connection:
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (pipeline.source.slot,))
        server = identify(connection)
    lake = HandLake(tmp_path / "lake", Position(server.system_id, server.timeline, 1), ["public.orders"])
    known, source = lake.registry.pipeline, pipeline.source
    assert known is not None
    lake.registry.write(replace(known, slot=source.slot, publication=source.publication))
    with database.superuser() as connection:
        # The insert position may be past it by now: a row above the slot names versions that this lake has not got.
        row = connection.execute(
            "select (confirmed_flush_lsn - '0/0')::bigint from pg_replication_slots where slot_name = %s",
            (pipeline.source.slot,),
        ).fetchone()
    assert row is not None
    lake.publish(int(row[0]))
    return pipeline, lake


def refusal(pipeline: Pipeline) -> Exception:
    generation = _generation(pipeline)
    with pytest.raises(Exception) as caught:
        catch_up(pipeline)
    assert _generation(pipeline) == generation, "a refused start must not raise the fence"
    return caught.value


def test_a_slot_that_somebody_else_has_read_is_refused(by_hand: tuple[Pipeline, HandLake], database: Database) -> None:
    pipeline, lake = by_hand
    with database.superuser() as connection:
        connection.execute("select pg_logical_emit_message(false, 'x', 'x'), pg_switch_wal()")
        connection.execute(
            "select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", (pipeline.source.slot,)
        )
    error = refusal(pipeline)
    assert isinstance(error, SlotGap)
    assert error.exit_status == 2
    assert f"past the ledger's {format_lsn(lake.position.lsn)}" in str(error)
    assert "verify PIPELINE.yaml --repair" in error.remedy


def test_a_slot_that_is_gone_is_refused(by_hand: tuple[Pipeline, HandLake], database: Database) -> None:
    pipeline, _ = by_hand
    with database.superuser() as connection:
        connection.execute("select pg_drop_replication_slot(%s)", (pipeline.source.slot,))
    error = refusal(pipeline)
    assert isinstance(error, SlotGap)
    assert error.exit_status == 2
    assert "does not exist any more" in str(error)


def test_a_slot_of_another_plugin_is_refused(by_hand: tuple[Pipeline, HandLake], database: Database) -> None:
    pipeline, _ = by_hand
    with database.superuser() as connection:
        connection.execute("select pg_drop_replication_slot(%s)", (pipeline.source.slot,))
        connection.execute("select pg_create_logical_replication_slot(%s, 'test_decoding')", (pipeline.source.slot,))
    error = refusal(pipeline)
    assert isinstance(error, SlotGap)
    assert error.code == "foreign_slot"


def test_another_server_is_refused(by_hand: tuple[Pipeline, HandLake]) -> None:
    pipeline, _ = by_hand
    registry = registry_of(pipeline)
    assert registry.pipeline is not None
    for changed in ({"system_id": "1"}, {"timeline": 7}):
        known = registry.pipeline
        registry.write(replace(known, **changed))
        error = refusal(pipeline)
        assert isinstance(error, SourceChanged)
        assert error.exit_status == 2
        registry.write(known)


def test_another_reader_of_the_slot_means_try_again(by_hand: tuple[Pipeline, HandLake], database: Database) -> None:
    pipeline, _ = by_hand
    stream = LogStream(database.conninfo)
    with connect(database.conninfo) as connection:
        version = identify(connection).version
    stream.start(pipeline.source.slot, ("headwater_shop", "headwater_shop_inserts"), 0, version)
    try:
        error = refusal(pipeline)
    finally:
        stream.close()
    assert isinstance(error, LostLease)
    assert (error.code, error.exit_status) == ("already_running", 1)


def test_replicate_without_a_loaded_table_is_refused(database: Database, tmp_path: Path) -> None:
    database.execute("create table orders (id int primary key)")
    with pytest.raises(Refused) as refused:
        catch_up(write_pipeline(tmp_path, database, "public.orders"))
    assert (refused.value.code, refused.value.exit_status) == ("nothing_loaded", 2)
    assert not (tmp_path / "lake").exists()


def test_a_driver_that_begins_behind_says_how_far(database: Database, tmp_path: Path, spark: SparkSession) -> None:
    database.execute("create table late (id int primary key)")
    database.allow_publishing()
    pipeline = loaded_pipeline(tmp_path, database, "public.late")

    def file() -> PositionFile | None:
        return read_position_file(pipeline.lake_path())

    with following(pipeline):
        until(lambda: (now := file()) is not None and now.samples, "it has asked the source's clock")
    before = file()
    assert before is not None
    database.execute("insert into late values (1)")
    database.execute("select pg_sleep(1)")
    database.execute("insert into late values (2)")
    with armed(tmp_path, "replicate.before_ledger") as hold, following(pipeline) as driver:
        hold.reached(driver)
        until(lambda: (now := file()) is not None and now.generation > before.generation, "the new driver's file")
        shown = status(pipeline)
        hold.release()
        until(lambda: len(lake_rows(pipeline, "public.late")) == 2, "both are there")
    assert shown["lag_bytes"] > 0
    assert shown["lag_seconds"] is not None
    epochs = RecentEpochs(pipeline.lake_path())
    epochs.refresh()
    behind = [epoch for epoch in epochs.epochs if epoch.generation > before.generation and epoch.lag is not None]
    assert max(epoch.lag or 0.0 for epoch in behind) > 1.0, "the first one had waited so long"
    assert all(epoch.lag >= epoch.latency - 1e-5 for epoch in behind if epoch.lag and epoch.latency), behind


def test_a_run_that_is_over_at_once_leaves_word_of_the_sources_clock(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_PERIOD", 60.0)
    database.execute("create table orders (id int primary key)", "insert into orders values (1)")
    database.allow_publishing()
    pipeline = pipeline_in_step(tmp_path, database, "public.orders")
    database.execute("insert into orders values (2)")  # what the source says now proves nothing of the lake
    result = wait(pipeline, None, "1h", 0)
    assert result.outcome is freshness.Outcome.SATISFIED, result


@pytest.mark.parametrize("names", ["*", "FIRST 1 (other, Headwater)"])
def test_a_driver_that_becomes_a_synchronous_standby_ends(
    database: Database, spark: SparkSession, tmp_path: Path, names: str
) -> None:
    database.allow_publishing()
    database.execute("create table t (id int primary key)", "insert into t values (1)")
    pipeline = pipeline_in_step(tmp_path, database, "public.t")
    with failing(pipeline) as running, database.superuser() as connection:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        connection.execute(f"alter system set synchronous_standby_names = '{names}'".encode())
        try:
            connection.execute("select pg_reload_conf()")
            until(running.done, "the driver has ended")
            with pytest.raises(Refused, match="a synchronous standby"):
                catch_up(pipeline)
        finally:
            connection.execute("alter system reset synchronous_standby_names")
            connection.execute("select pg_reload_conf()")

        def is_free() -> bool:
            slot = read_slot(connection, pipeline.source.slot)
            assert slot is not None
            return not slot.active

        until(is_free, "the server has seen that nobody reads the slot")
    ended = running.exception()
    assert isinstance(ended, Transient), "it may be so for a moment only; a start refuses what lasts"
    assert ended.code == "synchronous_standby"
    database.execute("insert into t values (2)")
    catch_up(pipeline)
    assert_equal(database, pipeline, "public.t")
