"""The source changes under a lake: a standby is promoted, a backup is put back, a slot is given up by the server.

Each is noticed before anything is applied, the message names the command, and after it the lake equals the source that
is there now. The servers are private: they are stopped, promoted and thrown back.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from fixtures.jobs import Job, assert_equal, catch_up, failing, following, lake_rows, load_tables, registry_of, until
from fixtures.lake_waits import wait
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database, has_received, new_database, server_setting
from headwater.apply.direct import Fence, take
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import LostLease, Refused, SlotGap, SourceChanged
from headwater.lake.ledger import Ledger, read_epoch, read_generation
from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.monitor.status import status
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position
from headwater.replicate.takeover.new_source import adopt
from headwater.source.connection import connect, position_now
from headwater.source.slot import read_slot
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

ORDERS, LINES = "public.orders", "public.lines"
ROWS = 500


@dataclass
class Source:
    """A primary with a pipeline that is in step; `now` is the database that the pipeline's connection leads to."""

    database: Database
    folder: Path
    now: Database = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.database

    def pipeline(self, **source: Any) -> Pipeline:
        section = {"slot": "shop", "connection": self.now.conninfo, **source}
        return write_pipeline(self.folder, self.now, ORDERS, LINES, source=section)

    def moves_to(self, server: EmbeddedServer) -> None:
        """The pipeline's connection leads to `server` from now on, as the address of a service would."""
        before, after = f":{self.database.server.port}/", f":{server.port}/"
        self.now = Database(
            server,
            self.database.name,
            self.database.conninfo.replace(before, after),
            self.database.owner.replace(before, after),
            self.database.owner_role,
        )


@pytest.fixture
def source(
    server_binaries: Path, server_folder: Callable[[], Path], tmp_path: Path, spark: SparkSession
) -> Iterator[Source]:
    with EmbeddedServer(server_folder(), server_binaries, durable=False) as primary, new_database(primary) as database:
        database.allow_publishing()
        for name in (ORDERS, LINES):
            database.execute(
                f"create table {name} (id int primary key, n int)",
                f"insert into {name} select i, i from generate_series(1, {ROWS}) as i",
            )
        made = Source(database, tmp_path)
        load_tables(made.pipeline())
        catch_up(made.pipeline())
        yield made


def settings(server: EmbeddedServer, **values: str) -> None:
    with server.connect() as connection:
        for name, value in values.items():
            connection.execute(f"alter system set {name} = '{value}'")
        connection.execute("select pg_reload_conf()")
    until(lambda: all(server_setting(server, name) == value for name, value in values.items()), "the settings hold")


def cut_off(standby: EmbeddedServer) -> None:
    """It hears of nothing that is committed from now on. A setting holds in a session before the process that reads
    from the primary has been told of it."""

    def reads() -> bool:
        with standby.connect() as connection:
            return connection.execute("select from pg_stat_wal_receiver").rowcount > 0

    until(reads, "the standby reads from its primary")
    settings(standby, primary_conninfo="")
    until(lambda: not reads(), "the standby has left its primary")


def synchronise_slot(primary: EmbeddedServer, standby: EmbeddedServer, pipeline: Pipeline) -> None:
    """What `sync_replication_slots` does by itself, at once. The slot is kept there when it has moved past what the
    standby has held back for it: as a driver that runs lets it."""
    with primary.connect() as connection:
        connection.execute("select pg_create_physical_replication_slot('standby', true)")
    secret = (primary.folder / "superuser_password").read_text()
    conninfo = f"host=127.0.0.1 port={primary.port} user=postgres password={secret} dbname=postgres"
    settings(standby, hot_standby_feedback="on", primary_slot_name="standby", primary_conninfo=conninfo)

    def is_synchronised() -> bool:
        with primary.connect() as one, standby.connect() as other:
            one.execute("select pg_log_standby_snapshot()")
            catch_up(pipeline)
            # The slot may have moved past what the standby has flushed so far, which the server refuses.
            with contextlib.suppress(psycopg.errors.ObjectNotInPrerequisiteState):
                other.execute("select pg_sync_replication_slots()")
            found = "select from pg_replication_slots where slot_name = %s and synced and not temporary"
            return other.execute(found, [pipeline.source.slot]).rowcount == 1

    until(is_synchronised, "the standby has the slot")


def promote(standby: EmbeddedServer) -> None:
    with standby.connect() as connection:
        connection.execute("select pg_promote(true, 60)")


def refused(pipeline: Pipeline, kind: type[Refused] = SourceChanged) -> Refused:
    """What a driver says before it changes anything."""
    before = read_generation(pipeline.lake_path(), pipeline.name), lake_rows(pipeline, ORDERS)
    with pytest.raises(kind) as caught:
        catch_up(pipeline)
    assert (read_generation(pipeline.lake_path(), pipeline.name), lake_rows(pipeline, ORDERS)) == before
    return caught.value


def assert_goes_on(source: Source, pipeline: Pipeline) -> None:
    """The lake is the source's, and follows it: for a driver, and for who waits."""
    catch_up(pipeline)
    assert_equal(source.now, pipeline, ORDERS, LINES)
    source.now.execute("update orders set n = n + 1 where id % 2 = 0", "delete from lines where id % 3 = 0")
    with following(pipeline):
        assert wait(pipeline, None, "now", 60).outcome == "satisfied"
    assert_equal(source.now, pipeline, ORDERS, LINES)
    assert {table["state"] for table in status(pipeline)["tables"].values()} == {"active"}


def test_a_promoted_standby_with_the_slot_and_everything_the_lake_holds_is_followed_without_a_load(
    source: Source, make_standby: Callable[[EmbeddedServer], EmbeddedServer]
) -> None:
    primary = source.database.server
    if primary_version(primary) < 170000:
        pytest.skip("failover slots came with PostgreSQL 17")
    standby = make_standby(primary)
    pipeline = source.pipeline()
    synchronise_slot(primary, standby, pipeline)
    with failing(moving(source, pipeline, standby)) as driver:
        source.database.execute("update orders set n = -1 where id < 100")
        assert wait(pipeline, None, "now", 60).outcome == "satisfied"
        has_received(standby, primary)
        primary.stop()
        promote(standby)
        until(driver.done, "the driver has met the other timeline", 60)
    assert isinstance(driver.exception(), SourceChanged)
    source.moves_to(standby)
    source.now.execute("insert into lines select i, 0 from generate_series(1001, 1100) as i")
    error = refused(source.pipeline())
    assert "source.on_timeline_change" in error.remedy
    incarnations = {name: record.incarnation for name, record in registry_of(pipeline).tables.items()}
    followed = source.pipeline(on_timeline_change="follow")
    assert_goes_on(source, followed)
    assert incarnations == {name: record.incarnation for name, record in registry_of(pipeline).tables.items()}
    # From here on it is the lake's timeline, whatever the file says.
    assert_goes_on(source, source.pipeline())


def test_a_server_that_was_promoted_gives_no_samples_to_a_lake_of_the_old_ones_log(
    source: Source, make_standby: Callable[[EmbeddedServer], EmbeddedServer]
) -> None:
    """The address leads to the new server, while the log's connection to the old one, which was not stopped, lives."""
    primary = source.database.server
    standby = make_standby(primary)
    has_received(standby, primary)
    pipeline = source.pipeline()
    root = pipeline.lake_path()

    def clocks() -> list[str]:
        file = read_position_file(root)
        return [time for time, _ in file.samples] if file is not None else []

    known = len(clocks())
    with failing(moving(source, pipeline, standby)) as driver:
        # The first new one is the driver's own, from before its sampler has a connection.
        until(lambda: len(clocks()) > known + 1, "the sampler asks the source")
        promote(standby)
        settings(primary, default_transaction_read_only="on")
        with primary.connect() as connection:
            # `now()` would be before its last sample.
            ended = "select pg_terminate_backend(pid, 5000), clock_timestamp()"
            ended += " from pg_stat_activity where application_name = %s"
            (_, moment), *_ = connection.execute(ended, ["headwater sampler"]).fetchall()
        until(driver.done, "the driver has met the other timeline", 60)
    settings(primary, default_transaction_read_only="off")
    assert isinstance(driver.exception(), SourceChanged)
    assert max(datetime.fromisoformat(time) for time in clocks()) <= moment


def test_what_an_old_driver_commits_while_another_follows_keeps_that_one_out(
    source: Source, make_standby: Callable[[EmbeddedServer], EmbeddedServer]
) -> None:
    """The old primary lives on with its driver when the connection leads to the promoted standby. Its epochs that come
    after the follower has looked are found behind the fence."""
    primary = source.database.server
    if primary_version(primary) < 170000:
        pytest.skip("failover slots came with PostgreSQL 17")
    standby = make_standby(primary)
    old = source.pipeline()
    synchronise_slot(primary, standby, old)
    has_received(standby, primary)
    promote(standby)
    source.moves_to(standby)
    followed = source.pipeline(on_timeline_change="follow")
    source.database.execute("update orders set n = -1 where id < 100")
    begin = Ledger.begin_generation

    def late(ledger: Ledger, position: Position) -> int:
        """Between the look of the one that follows and its fence the old driver publishes."""
        with pytest.MonkeyPatch.context() as undone:
            undone.setattr(Ledger, "begin_generation", begin)
            catch_up(old)
        return begin(ledger, position)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Ledger, "begin_generation", late)
        with pytest.raises(SourceChanged, match="it cannot be followed exactly: the lake stands at"):
            catch_up(followed)
    # The old driver is out, and the person has the next rung.
    assert "verify PIPELINE.yaml --repair --new-source" in refused(followed).remedy
    verify(followed, repair=True, new_source=True)
    assert_goes_on(source, followed)


def test_a_sibling_s_timeline_of_the_same_number_is_no_source_of_the_lake(
    source: Source, make_standby: Callable[[EmbeddedServer], EmbeddedServer]
) -> None:
    primary = source.database.server
    one, other = make_standby(primary), make_standby(primary)
    has_received(one, primary)
    cut_off(one)
    source.database.execute("insert into lines values (1001, 1)")
    has_received(other, primary)
    cut_off(other)
    promote(one)
    source.moves_to(one)
    pipeline = source.pipeline()
    verify(pipeline, repair=True, new_source=True)
    assert_goes_on(source, pipeline)
    with other.connect() as connection:
        connection.execute("select pg_promote(true, 60)")
    source.moves_to(other)
    with source.now.superuser() as connection:
        # Past where the lake stands: the positions alone tell nothing.
        connection.execute("select pg_switch_wal()")
        connection.execute("insert into lines values (1002, 1)")
        connection.execute("select pg_switch_wal()")
    assert "comes from elsewhere" in str(refused(source.pipeline()))


def test_no_source_is_changed_below_a_running_driver(source: Source) -> None:
    pipeline = source.pipeline()
    with following(pipeline), connect(source.database.conninfo) as connection:

        def is_taken() -> bool:
            slot = read_slot(connection, pipeline.source.slot)
            return slot is not None and slot.active

        until(is_taken, "the driver reads the log")
        with pytest.raises(LostLease, match="a replicate works with this source"):
            adopt(pipeline)
        assert {table["state"] for table in status(pipeline)["tables"].values()} == {"active"}


def moving(source: Source, pipeline: Pipeline, standby: EmbeddedServer) -> Pipeline:
    """`pipeline` with a connection to whichever of both servers takes writes, as libpq knows how to ask for."""
    ports = f"{source.database.server.port},{standby.port}"
    conninfo = source.database.conninfo.replace(f"127.0.0.1:{source.database.server.port}/", "/")
    return source.pipeline(
        connection=f"{conninfo}?host=127.0.0.1,127.0.0.1&port={ports}&target_session_attrs=read-write"
    )


def primary_version(server: EmbeddedServer) -> int:
    with server.connect() as connection:
        return connection.info.server_version


def test_rows_that_a_lagging_standby_never_had_leave_the_lake_by_a_repair(
    source: Source,
    make_standby: Callable[[EmbeddedServer], EmbeddedServer],
    spark: SparkSession,
) -> None:
    primary = source.database.server
    standby = make_standby(primary)
    has_received(standby, primary)
    cut_off(standby)
    pipeline = source.pipeline(on_timeline_change="follow")
    source.database.execute(
        "update orders set n = -1 where id < 20",
        "delete from orders where id between 30 and 40",
        "insert into lines select i, 0 from generate_series(1001, 3000) as i",
    )
    catch_up(pipeline)
    before = read_epoch(pipeline.lake_path())
    primary.stop()
    promote(standby)
    source.moves_to(standby)
    source.now.execute("update orders set n = -2 where id between 10 and 35", "insert into lines values (1001, 7)")
    pipeline = source.pipeline(on_timeline_change="follow")
    assert before is not None
    with connect(source.now.conninfo) as connection:
        assert position_now(connection).lsn < before.position.lsn
    error = refused(pipeline)
    assert "it cannot be followed exactly: the lake stands at" in str(error)
    assert "verify PIPELINE.yaml --repair --new-source" in error.remedy
    assert wait(pipeline, None, "now", 5).outcome == "timeline_changed"
    for name in ("adopt.suspended", "adopt.slot", "adopt.ledger"):
        with Job(pipeline, "verify", "--repair", "--new-source", failpoint=name, spark=spark) as job:
            assert job.wait() == -signal.SIGKILL, job.log[-3000:]
    result = verify(pipeline, repair=True, new_source=True)
    assert result["position"]["timeline"] == 2
    found = result["tables"]
    assert (found[ORDERS]["repaired"], found[LINES]["repaired"]) == (26 + 9 + 5, 2000)
    assert not any(table.get("written_anew") for table in found.values())
    assert_goes_on(source, pipeline)
    after = read_epoch(pipeline.lake_path())
    assert after is not None
    assert (after.epoch > before.epoch, after.position.timeline) == (True, 2)


def test_a_source_restored_from_an_older_backup_is_noticed_and_loaded_again(source: Source) -> None:
    server, pipeline = source.database.server, source.pipeline()
    backup = server.folder / "backup"
    server.stop()
    subprocess.run(["cp", "-a", str(server.data), str(backup)], check=True)
    server.start()
    source.database.execute("update orders set n = -1", "insert into lines values (1001, 0)")
    with failing(pipeline) as driver:
        assert wait(pipeline, None, "now", 60).outcome == "satisfied"
        server.stop()
        server.data.rename(server.folder / "thrown away")
        backup.rename(server.data)
        server.start()
        until(driver.done, "the driver has met the older state", 60)
    assert isinstance(driver.exception(), SourceChanged)
    assert "restored from an older state" in str(driver.exception())
    source.database.execute("update lines set n = 7 where id < 10")
    error = refused(pipeline)
    assert "restored from an older state" in str(error)
    with pytest.raises(SourceChanged):
        load_tables(pipeline, again=True)
    adopt(pipeline)
    load(pipeline, again=True)
    assert_goes_on(source, pipeline)


def test_a_slot_that_the_server_gave_up_is_a_gap_until_what_differs_is_repaired(source: Source) -> None:
    pipeline = source.pipeline()
    with source.database.superuser() as connection:
        connection.execute("create table unheard (note text)")
        connection.execute("alter system set max_slot_wal_keep_size = '16MB'")
        connection.execute("select pg_reload_conf()")
    source.database.execute("update orders set n = -1")

    def is_lost() -> bool:
        with source.database.superuser() as connection:
            connection.execute("insert into unheard select repeat('x', 1000) from generate_series(1, 30000)")
            connection.execute("select pg_switch_wal()")
            connection.execute("checkpoint")
        with connect(source.database.conninfo) as connection:
            slot = read_slot(connection, pipeline.source.slot)
            return slot is not None and bool(slot.loss)

    until(is_lost, "the server has given the slot up")
    error = refused(pipeline, SlotGap)
    assert "the server has given the slot up" in str(error)
    assert "verify PIPELINE.yaml --repair" in error.remedy
    assert wait(pipeline, None, "now", 60).outcome == "suspended"
    found = verify(pipeline, repair=True)["tables"]
    assert [found[name]["repaired"] for name in (ORDERS, LINES)] == [ROWS, 0]
    assert not any(table.get("written_anew") for table in found.values())
    assert_goes_on(source, pipeline)


def test_a_table_that_only_spark_may_write_is_not_fenced_off_by_a_commit_that_would_end_its_use(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = str(tmp_path / "t")
    properties = "tblproperties ('delta.enableInCommitTimestamps' = 'true')"
    spark.sql(f"create table delta.`{folder}` (id int) using delta {properties}")
    take(folder, Fence("fence", 3))
    spark.sql(f"insert into delta.`{folder}` values (1)")
    history = spark.sql(f"describe history delta.`{folder}`").collect()
    assert [row["operation"] for row in history] == ["WRITE", "CREATE TABLE"]
