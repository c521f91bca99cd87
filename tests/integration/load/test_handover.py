"""From the load to the log without losing or doubling a row, whatever runs at the source at the capture point.

The rules are those of docs/architecture.md, "Load and hand-over"; each test says what breaks without its rule. Loads
are stopped at failpoints, so that everything below happens at exactly the moment that matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fixtures.jobs import (
    armed,
    assert_equal,
    catch_up,
    following,
    in_thread,
    lake_path_of,
    load_tables,
    record_of,
    registry_of,
    source_rows,
    stalled_commit,
    states_of,
    until,
)
from fixtures.lakes import HandLake
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.delta.tables import current
from headwater.errors import LostLease, Transient
from headwater.lake.ledger import read_all
from headwater.lake.registry import Capture, Registry
from headwater.load import one_table as table_load
from headwater.load.handover import finish_handovers
from headwater.load.load import load
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position
from headwater.source.samples import commit_position
from headwater.source.slot import read_slot
from headwater.source.snapshots import VisibilitySnapshot, capture_point, wait_for_old_transactions

pytestmark = pytest.mark.postgres


@dataclass(frozen=True)
class Source:
    database: Database
    folder: Path

    def pipeline(self, *tables: str, **sections: Any) -> Pipeline:
        return write_pipeline(self.folder, self.database, *tables, **sections)


@pytest.fixture(scope="module")
def source(shared_database: Database, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(shared_database, tmp_path_factory.mktemp("handover"))


# One load of several tables is stopped while it commits the first one. What happens then is open at, or just before,
# the capture points of the others.

FIRST = "public.a_first"
ONE_BY_ONE = {"connections": 1}
STAGES = ("public.b_before", "public.b_prepared", "public.b_stalled", "public.b_subtransactions")


@pytest.fixture(scope="module")
def handed_over(source: Source) -> Pipeline:
    database = source.database
    for name in (FIRST, *STAGES):
        database.execute(
            f"create table {name} (id int primary key, n int, note text)",
            f"insert into {name} select i, 0, 'old' from generate_series(1, 5) i",
        )
    pipeline = source.pipeline(FIRST, *STAGES, load=ONE_BY_ONE)
    with armed(source.folder, "load.before_commit") as hold, database.connect(autocommit=False) as open_one:
        loading = in_thread(lambda: load_tables(pipeline))
        hold.reached(loading)
        assert registry_of(pipeline).record(FIRST).state == "loading"
        database.execute("insert into b_before values (6, 1, 'before')", "update b_before set n = 1 where id = 1")
        _write_with_subtransactions(open_one)
        _prepare(database)
        with stalled_commit(database, "insert into b_stalled values (6, 1, 'stalled')"):
            hold.release()
            states = states_of(loading.result(120))
            assert set(states.values()) == {"catching up"}
            assert record_of(pipeline, STAGES[2]).capture is not None
            assert (6, 1, "stalled") not in source_rows(database, "b_stalled")[1]
        open_one.execute("insert into b_subtransactions values (9, 1, 'after the capture')")
        open_one.commit()
        database.execute("commit prepared 'across the capture'")
    assert set(states_of(catch_up(pipeline)).values()) == {"active"}
    return pipeline


def _write_with_subtransactions(connection: psycopg.Connection[Any]) -> None:
    connection.execute("update b_subtransactions set n = 1 where id = 1")
    for row, keep in ((6, True), (7, False), (8, True)):
        connection.execute("savepoint one")
        connection.execute("insert into b_subtransactions values (%s, 1, 'sub')", (row,))
        connection.execute("release savepoint one" if keep else "rollback to savepoint one")


def _prepare(database: Database) -> None:
    with database.connect(autocommit=False) as connection:
        connection.execute("insert into b_prepared values (6, 1, 'prepared')")
        connection.execute("delete from b_prepared where id = 1")
        connection.execute("prepare transaction 'across the capture'")
        connection.commit()


def test_changes_before_the_capture_point_are_not_applied_again(source: Source, handed_over: Pipeline) -> None:
    # The slot delivers them, because it is older than the snapshot that holds them. Applied again, the insert meets
    # its own row: the table diverges.
    assert_equal(source.database, handed_over, "public.b_before")


def test_a_commit_that_waited_for_its_standby_at_the_capture_point_is_not_lost(
    source: Source, handed_over: Pipeline
) -> None:
    # Its end lies at or below the capture LSN, and the snapshot did not see it: comparing LSNs would skip it.
    assert (6, 1, "stalled") in source_rows(source.database, "b_stalled")[1]
    assert_equal(source.database, handed_over, "public.b_stalled")


def test_a_transaction_prepared_across_the_capture_point_is_not_lost(source: Source, handed_over: Pipeline) -> None:
    # It stays in the snapshot's list of running ones although no session runs it; `handover_end` must wait for it,
    # or later changes of its own xid would be taken for visible.
    assert_equal(source.database, handed_over, "public.b_prepared")


def test_subtransactions_open_at_the_capture_point_are_judged_by_their_top_level(
    source: Source, handed_over: Pipeline
) -> None:
    # A snapshot lists top-level transactions only: asked about a subtransaction's own xid it would answer "visible".
    assert_equal(source.database, handed_over, "public.b_subtransactions")


def test_a_transaction_open_at_the_capture_point_is_applied_once_when_it_commits(
    source: Source, handed_over: Pipeline
) -> None:
    # Its id lies below those of transactions that were applied long before it. Until it has ended, visibility decides.
    database, name = source.database, "public.d_late"
    database.execute(
        "create table d_late (id int primary key, n int)", "insert into d_late select i, 0 from generate_series(1, 5) i"
    )
    pipeline = source.pipeline(FIRST, *STAGES, name, load=ONE_BY_ONE)
    with armed(source.folder, "load.before_commit") as hold, database.connect(autocommit=False) as late:
        loading = in_thread(lambda: load_tables(pipeline, FIRST, name, again=True))
        hold.reached(loading)
        late.execute("insert into d_late values (6, 1)")
        late.execute("delete from d_late where id = 1")
        # Ended before the capture point with a higher id: the snapshot sees it, and has to list the other one.
        database.execute("update d_late set n = 1 where id = 5")
        hold.release()
        assert states_of(loading.result(120)) == {FIRST: "catching up", name: "catching up"}
        database.execute("insert into d_late values (7, 2)", "update d_late set n = 2 where id = 2")
        assert states_of(catch_up(pipeline))[name] == "active"
        assert_equal(database, pipeline, name)
        assert _capture(pipeline, name).handover_end is None, "a transaction below the snapshot's end still runs"
        late.execute("update d_late set n = 3 where id = 3")
        late.commit()
        committed = commit_position(late)
    assert states_of(catch_up(pipeline))[name] == "active"
    assert_equal(database, pipeline, name)
    end = _capture(pipeline, name).handover_end
    assert end is not None
    assert end >= committed.lsn

    # Far past it, ids have wrapped and look as if the snapshot had seen them all: nobody may ask it any more.
    record = record_of(pipeline, name)
    capture = _capture(pipeline, name)
    wrapped = VisibilitySnapshot.parse(capture.snapshot).xmax + (1 << 30)
    registry = registry_of(pipeline)
    registry.write(replace(record, capture=replace(capture, snapshot=f"{wrapped}:{wrapped}:")))
    database.execute("insert into d_late values (8, 4)", "update d_late set n = 4 where id = 2")
    catch_up(pipeline)
    assert_equal(database, pipeline, name)


def test_a_hand_over_ends_under_a_driver_that_runs_on(source: Source, handed_over: Pipeline) -> None:
    database, name = source.database, STAGES[0]
    with armed(source.folder, "load.before_commit") as hold, database.connect(autocommit=False) as late:
        loading = in_thread(lambda: load_tables(handed_over, FIRST, name, again=True))
        hold.reached(loading)
        late.execute("update b_before set n = 9 where id = 2")
        database.execute("update b_before set n = 8 where id = 3")
        hold.release()
        loading.result(120)
        with following(handed_over) as running:
            until(lambda: record_of(handed_over, name).state == "active" or running.done(), "the driver runs")
            assert _capture(handed_over, name).handover_end is None
            late.commit()
            until(lambda: _capture(handed_over, name).handover_end is not None or running.done(), "it has ended")
    assert running.result()["stopped_by"] == "signal"
    assert_equal(database, handed_over, name)


def _capture(pipeline: Pipeline, name: str) -> Capture:
    capture = record_of(pipeline, name).capture
    assert capture is not None
    return capture


def test_a_loaded_table_joins_cuts_only_from_its_capture_point_on(handed_over: Pipeline) -> None:
    for epoch in read_all(handed_over.lake_path()):
        for name in (FIRST, *STAGES):
            capture = _capture(handed_over, name)
            # Other tests load some of these again: an epoch before that speaks of an earlier capture point.
            before = epoch.applied_at < datetime.fromisoformat(capture.taken_at)
            if epoch.tables[name].state == "active" and not before:
                assert epoch.position.lsn >= capture.lsn


# Adding a table to the publication


def test_the_first_load_waits_for_open_transactions_as_long_as_it_may_and_leaves_nothing(
    database: Database, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute("create table t (id int primary key)", "insert into t values (1)")
    pipeline = write_pipeline(tmp_path, database, "public.t", load={"wait_for_old_transactions": "1s"})
    with database.connect(autocommit=False) as writer, database.connect(autocommit=False) as later:
        writer.execute("insert into t values (2)")
        with pytest.raises(Transient) as refused:
            in_thread(lambda: load_tables(pipeline)).result(60)
        assert refused.value.code == "old_transactions"
        assert f"process {writer.info.backend_pid} " in refused.value.message
        writer.commit()
        # A transaction that begins after that wait blocks the slot itself.
        with pytest.MonkeyPatch.context() as patch:
            wait = wait_for_old_transactions

            def and_then(*given: Any, **named: Any) -> bool:
                found = wait(*given, **named)
                later.execute("insert into t values (3)")
                return found

            patch.setattr("headwater.source.slot.wait_for_old_transactions", and_then)
            with pytest.raises(Transient) as refused:
                in_thread(lambda: load_tables(pipeline)).result(60)
        assert refused.value.code == "old_transactions"
        assert f"process {later.info.backend_pid} " in refused.value.message
        later.commit()
    with database.connect_as_headwater() as connection:
        assert read_slot(connection, pipeline.source.slot) is None
    assert states_of(load_tables(pipeline)) == {"public.t": "catching up"}
    database.execute("insert into t values (4)")
    catch_up(pipeline)
    assert_equal(database, pipeline, "public.t")


def test_a_transaction_open_across_add_table_is_waited_for(source: Source, handed_over: Pipeline) -> None:
    # The log carries only what it wrote after the ALTER: with a capture point before its end, the row written before
    # the ALTER would come neither with the load nor with the log.
    database = source.database
    database.execute("create table c_open (id int primary key, n int)", "insert into c_open values (1, 1)")
    names = (FIRST, *STAGES, "public.c_open")
    hasty = source.pipeline(*names, load={"wait_for_old_transactions": "2s"})
    with database.connect(autocommit=False) as writer:
        writer.execute("insert into c_open values (2, 2)")
        with pytest.raises(Transient) as refused:
            load_tables(hasty, "public.c_open")
        assert (refused.value.code, refused.value.exit_status) == ("old_transactions", 1)
        assert f"process {writer.info.backend_pid} (user {database.owner_role}" in refused.value.message
        pipeline = source.pipeline(*names, load={"wait_for_old_transactions": "2m"})
        with armed(source.folder, "load.after_publication") as hold:
            loading = in_thread(lambda: load_tables(pipeline, "public.c_open"))
            hold.reached(loading)
            hold.release()
            writer.execute("insert into c_open values (3, 3)")
            assert not loading.done()
            writer.commit()
            assert states_of(loading.result(60)) == {"public.c_open": "catching up"}
    database.execute("update c_open set n = n + 1")
    catch_up(pipeline)
    assert_equal(database, pipeline, "public.c_open")


# Tables rewritten while they are loaded

REWRITES = {
    # Under the old snapshot a rewritten or truncated table reads as empty, and the log carries nothing of a rewrite.
    "public.r_using": ("load.after_capture", "alter table r_using alter column n type bigint using n + 1000"),
    "public.r_truncated": ("load.after_capture", "truncate r_truncated"),
    "public.r_vacuumed": ("load.after_capture", "vacuum full r_vacuumed"),
    # Read and committed, but rewritten before the table is entered as loaded: no later look would see it.
    "public.r_late": ("load.after_commit", "alter table r_late alter column n type int using n + 1000"),
    "public.r_added": ("load.before_commit", "alter table r_added add column extra int default 7"),
}


@pytest.fixture(scope="module")
def rewritten(source: Source, handed_over: Pipeline) -> Pipeline:
    database = source.database
    for name in REWRITES:
        database.execute(
            f"create table {name} (id int primary key, n int, note text)",
            f"insert into {name} select i, 0, 'old' from generate_series(1, 50) i",
            f"delete from {name} where id between 10 and 40",
        )
    pipeline = source.pipeline(FIRST, *STAGES, *REWRITES)
    for name, (failpoint, statement) in REWRITES.items():
        with armed(source.folder, failpoint) as hold:
            loading = in_thread(partial(load_tables, pipeline, name))
            hold.reached(loading)
            if name == "public.r_using":
                _others_beside_the_load(pipeline)
            database.execute(
                statement,
                f"insert into {name} (id, n, note) values (60, 60, 'after')",
                f"update {name} set note = 'again' where id = 3",
            )
            hold.release()
            assert states_of(loading.result(120)) == {name: "catching up"}, record_of(pipeline, name).reason
    assert "suspended" not in states_of(catch_up(pipeline)).values()
    return pipeline


def test_a_table_that_was_published_by_a_load_that_ended_there_keeps_its_writers(
    database: Database, tmp_path: Path
) -> None:
    database.execute(*[f"create table {name} (id int primary key)" for name in ("a", "b")], "insert into b values (1)")
    database.allow_publishing()
    pipeline_in_step(tmp_path, database, "public.a")
    pipeline = write_pipeline(tmp_path, database, "public.a", "public.b", load={"wait_for_old_transactions": "0.1s"})
    published = "select tablename from pg_publication_tables where tablename = 'b'"
    with following(pipeline) as running:
        with database.connect(autocommit=False) as open_one:
            open_one.execute("insert into a values (2)")
            with pytest.raises(Transient) as late:
                load(pipeline)
        assert late.value.code == "old_transactions"
        assert database.query(published)
        assert record_of(pipeline, "public.b").state == "new"
        database.execute("insert into b values (2)", "alter table b drop constraint b_pkey")
        until(lambda: not database.query(published) or running.done(), "the driver takes it out of the publication")
        database.execute("update b set id = 3 where id = 2", "alter table b add primary key (id)")
        load(pipeline)
        until(lambda: record_of(pipeline, "public.b").state == "active" or running.done(), "it is in step")
        assert_equal(database, pipeline, "public.a", "public.b")


def _others_beside_the_load(pipeline: Pipeline) -> None:
    """Another load is refused, a driver goes on with the other tables."""
    with pytest.raises(LostLease) as refused:
        load_tables(pipeline, FIRST, again=True)
    assert (refused.value.code, refused.value.exit_status) == ("lease_held", 1)
    assert "a load is running" in refused.value.message
    assert "active" in states_of(catch_up(pipeline)).values()


@pytest.mark.parametrize("name", REWRITES)
def test_a_table_rewritten_while_it_is_loaded_is_loaded_anew(source: Source, rewritten: Pipeline, name: str) -> None:
    assert_equal(source.database, rewritten, name)
    assert record_of(rewritten, name).incarnation == 2


@pytest.mark.parametrize(
    ("when", "statements", "incarnation"),
    [
        ("before", ["truncate moved", "insert into moved values (1, 7), (2, 8)"], 1),
        ("before", ["alter table moved alter n type int using n + 1000"], 1),
        ("before", ["alter table moved add more int"], 2),
        # The snapshot sees the files of before.
        ("after", ["alter table moved alter n type int using n + 1000"], 2),
    ],
)
def test_new_files_are_read_if_the_capture_point_sees_them(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    statements: list[str],
    incarnation: int,
) -> None:
    database.allow_publishing()
    database.execute("create table moved (id int primary key, n int)", "insert into moved values (1, 1), (3, 3)")
    pipeline = write_pipeline(tmp_path, database, "public.moved")
    left = [statements]

    @contextmanager
    def at_the_same_moment(*arguments: Any) -> Iterator[Any]:
        if when == "before" and left:
            database.execute(*left.pop())
        with capture_point(*arguments) as capture:
            if left:
                database.execute(*left.pop())
            yield capture

    monkeypatch.setattr(table_load, "capture_point", at_the_same_moment)
    load_tables(pipeline)
    assert record_of(pipeline, "public.moved").incarnation == incarnation
    catch_up(pipeline)
    assert_equal(database, pipeline, "public.moved")


def test_a_load_makes_nothing_be_skipped_by_position(source: Source, rewritten: Pipeline) -> None:
    # Its commit carries the slot's position of that moment, not the capture point's.
    database = source.database
    with database.connect_as_headwater() as connection:
        before = read_slot(connection, rewritten.source.slot)
    assert before is not None
    database.execute("insert into a_first values (70, 1, 'before the load')")
    load_tables(rewritten, FIRST, again=True)
    record = record_of(rewritten, FIRST)
    found = current(lake_path_of(rewritten, FIRST), record.app_id(rewritten.name))
    assert found is not None
    assert found[1] == before.confirmed_lsn
    assert record.capture is not None
    assert record.capture.lsn > found[1]
    database.execute("insert into a_first values (71, 1, 'after the load')")
    catch_up(rewritten)
    assert_equal(database, rewritten, FIRST)


def test_what_a_load_has_cured_is_no_trouble_again_when_the_log_brings_the_changes_of_before(
    database: Database, tmp_path: Path
) -> None:
    kept = ("public.again", "public.parted", "public.keyless")
    database.allow_publishing()
    database.execute(
        "create table again (id int primary key, n int)",
        "create table moved (id int primary key, n int)",
        "create table keyless (id int primary key, n int)",
        "create table parted (id int primary key, n int) partition by range (id)",
        "create table parted_1 partition of parted for values from (0) to (100)",
        *(f"insert into {name} values (1, 1)" for name in ("again", "moved", "keyless", "parted")),
    )
    pipeline_in_step(tmp_path, database, *kept, "public.moved")
    database.execute(
        *(f"insert into {name} values (2, 2)" for name in ("again", "moved", "parted")),
        "alter table keyless replica identity nothing",
        "insert into keyless values (2, 2)",
        "drop table again",
        "create table again (id int primary key, n int)",
        "insert into again values (3, 3)",
        "drop table parted_1",
        "create table parted_1 partition of parted for values from (0) to (100)",
        "insert into parted values (3, 3)",
        "alter table moved rename to moved_on",
        "alter table keyless replica identity default",
    )
    pipeline = write_pipeline(tmp_path, database, *kept, "public.moved_on")
    load(pipeline)
    load_tables(pipeline, *kept, again=True)
    # In one batch with the older ones.
    database.execute(
        *(f"insert into {name} values (4, 4)" for name in ("again", "moved_on", "keyless", "parted")),
    )
    catch_up(pipeline)
    tables = (*kept, "public.moved_on")
    assert {name: record_of(pipeline, name).reason for name in tables} == dict.fromkeys(tables, "")
    assert_equal(database, pipeline, *tables)


def test_the_end_of_a_hand_over_is_not_noted_with_a_load_that_came_after_the_question(
    shared_database: Database, tmp_path: Path
) -> None:
    with shared_database.connect() as connection:
        row = connection.execute("select pg_current_snapshot()::text").fetchone()
        assert row is not None
        first, second = (Capture(lsn, row[0], None, "2026-01-01T00:00:00Z") for lsn in (0x100, 0x200))
        lake = HandLake(tmp_path, Position("7", 1, 0x100), ["public.a"])
        lake.registry.write(replace(lake.registry.record("public.a"), incarnation=1, capture=first))
        asked = Registry.open(lake.root, "shop")
        assert asked is not None
        lake.registry.write(replace(lake.registry.record("public.a"), incarnation=2, capture=second))
        finish_handovers(connection, asked)
        assert asked.record("public.a").capture == second
        finish_handovers(connection, asked)
        ended = asked.record("public.a").capture
        assert ended is not None
        assert ended.handover_end is not None
        assert replace(ended, handover_end=None) == second
