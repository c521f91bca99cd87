"""Large transactions are worked on while they are open; whatever becomes of them, the lake is what the source is.

All cases share one source and one lake, each with a driver that stages from a megabyte on. What was staged shows in the
lake's `staged` folder, and whether it was used in the driver's log.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from fixtures.jobs import Job, assert_equal, beside, catch_up, lake_path_of, until
from fixtures.loaded import loaded_pipeline
from fixtures.postgres import Database, new_database
from fixtures.staged import staged_files
from headwater.delta import storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import log_path
from headwater.demo.postgres import EmbeddedServer
from headwater.lake.position_file import read_position_file
from headwater.log.net import net_effect
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import parse_lsn
from headwater.replicate.preapply import decide
from headwater.replicate.replicate import replicate
from headwater.source.connection import Connection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

TABLES = ("public.one", "public.two", "public.log", "public.parts")
STAGE_FROM = 1 << 20
FILL = "insert into {table} select g, repeat(md5(g::text), 12) from generate_series({first}, {last}) g"
ROWS = 12_000  # about 5 MB: more than the server keeps back


@dataclass
class Lake:
    database: Database
    pipeline: Pipeline
    caplog: pytest.LogCaptureFixture

    @property
    def staged(self) -> list[str]:
        return staged_files(self.pipeline.lake_path())

    def wait_staged(self, files: int = 1) -> None:
        until(lambda: len(self.staged) >= files, "rows are staged")

    def wait_rows_staged(self, rows: int) -> None:
        """And the driver knows of it: a file is there before the stager has answered."""
        until(lambda: sum(self._told_staged().values()) >= rows, f"{rows} rows are staged")

    def wait_rows_of_each_staged(self, rows: int) -> None:
        """As `wait_rows_staged`, of every table."""

        def staged(table: str) -> int:
            return sum(changes for (name, _), changes in self._told_staged().items() if name == table)

        until(lambda: all(staged(table) >= rows for table in TABLES), f"{rows} rows of each table are staged")

    def published(self) -> None:
        with self.database.connect() as connection:
            connection.execute("select pg_logical_emit_message(true, 'here', '')")
            row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        end, root = parse_lsn(row[0]), self.pipeline.lake_path()

        def there() -> bool:
            file = read_position_file(root)
            return file is not None and file.read_position >= end and not file.pending

        until(there, "everything is published")

    def _told_staged(self) -> dict[tuple[str, int], int]:
        """Changes by table and transaction."""
        told = [record for record in self.caplog.records if record.msg.startswith("%s: of open transaction")]
        return {(table, xid): changes for record in told for table, xid, changes in [cast("Any", record.args)]}

    def said(self, text: str) -> list[str]:
        return [record.getMessage() for record in self.caplog.records if text in record.getMessage()]

    @contextlib.contextmanager
    def open_transaction(self) -> Iterator[Connection]:
        with self.database.connect(autocommit=False) as connection:
            yield connection

    @contextlib.contextmanager
    def following(self) -> Iterator[Any]:
        """A driver beside the block; in the end everything is equal and nothing is left over."""
        self.caplog.set_level(logging.INFO, logger="headwater")
        self.caplog.set_level(logging.DEBUG, logger=decide.__name__)
        with beside(lambda stop: replicate(self.pipeline, None, None, stop, stage_from=STAGE_FROM)) as running:
            self.published()
            yield running
            self.published()
            until(lambda: not self.staged, "nothing is staged any more")
        assert_equal(self.database, self.pipeline, *TABLES)


@pytest.fixture(scope="module")
def made(
    postgres: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Database, Pipeline]]:
    with new_database(postgres) as database:
        for table in ("one", "two"):
            database.execute(f"create table {table} (id bigint primary key, note text)")
            database.execute(FILL.format(table=table, first=1, last=2000))
        database.execute("create table log (id bigint, note text)")
        database.execute("create table parts (id bigint primary key, note text) partition by hash (id)")
        for leaf in range(2):
            database.execute(
                f"create table parts_{leaf} partition of parts for values with (modulus 2, remainder {leaf})"
            )
        database.execute(FILL.format(table="parts", first=1, last=2000))
        database.allow_publishing()
        folder = tmp_path_factory.mktemp("preapply")
        inserts = {"name": "public.log", "insert_only": True}
        pipeline = loaded_pipeline(folder, database, "public.one", "public.two", "public.parts", inserts)
        yield database, pipeline


@pytest.fixture
def lake(made: tuple[Database, Pipeline], caplog: pytest.LogCaptureFixture) -> Lake:
    database, pipeline = made
    for table in ("one", "two", "parts"):
        database.execute(f"delete from {table} where id > 2000")
    catch_up(pipeline)  # else the driver may stage these deletes, and the test take them for its own
    return Lake(database, pipeline, caplog)


def test_of_several_tables_in_one_transaction_only_the_tail_is_left_to_its_commit(lake: Lake) -> None:
    with lake.following(), lake.open_transaction() as connection:
        for table in ("one", "two", "log", "parts"):
            connection.execute(FILL.format(table=table, first=10_001, last=10_000 + ROWS))
        lake.wait_staged(4)
        for table in ("one", "two", "parts"):
            connection.execute(f"update {table} set note = 'changed ' || id where id % 3 = 0")
            connection.execute(f"delete from {table} where id % 5 = 0")
            connection.execute(f"update {table} set id = id + 50000 where id % 7 = 0 and id > 10000")
            connection.execute(FILL.format(table=table, first=10_005, last=10_005))
        before = len(lake.staged)
        connection.execute("update two set note = repeat('x', 400) || id where id > 10000")
        lake.wait_staged(before + 1)
        # Of less than a quarter of a table's changes nothing is used; to "two" comes most, about 30,000.
        lake.wait_rows_of_each_staged(ROWS * 3 // 4)
        # Others go on meanwhile, on the same tables.
        lake.database.execute("insert into one values (900001, 'small')")
        lake.database.execute("insert into two values (900002, 'small')")
        lake.published()
        connection.commit()
        lake.published()
        for table in TABLES:
            assert lake.said(f"{table}: of transaction"), lake.said("transaction")


def test_a_rollback_removes_what_was_staged_at_once(lake: Lake) -> None:
    with lake.following(), lake.open_transaction() as connection:
        connection.execute(FILL.format(table="one", first=10_001, last=10_000 + ROWS))
        lake.wait_staged()
        connection.rollback()
        until(lambda: not lake.staged, "it is removed")


def test_a_subtransaction_that_was_rolled_back_after_it_was_staged_leaves_no_trace(lake: Lake) -> None:
    with lake.following(), lake.open_transaction() as connection:
        connection.execute(FILL.format(table="one", first=10_001, last=10_000 + ROWS))
        connection.execute("savepoint s")
        connection.execute(FILL.format(table="one", first=30_001, last=30_000 + ROWS))
        connection.execute("update one set note = 'of the past' where id < 20000")
        lake.wait_rows_staged(ROWS + 500)
        connection.execute("rollback to s")
        connection.execute(FILL.format(table="one", first=60_001, last=60_000 + ROWS))
        connection.commit()
        lake.published()
        assert lake.said("was rolled back after it had been staged")


def test_a_subtransaction_rolled_back_before_it_was_staged_costs_nothing(lake: Lake) -> None:
    with lake.following(), lake.open_transaction() as connection:
        connection.execute(FILL.format(table="one", first=10_001, last=10_000 + 3 * ROWS))
        lake.wait_rows_staged(ROWS)
        connection.execute("savepoint s")
        connection.execute("insert into one values (99999, 'never')")
        connection.execute("rollback to s")
        connection.execute("insert into one values (99998, 'kept')")
        connection.commit()
        lake.published()
        assert lake.said("public.one: of transaction")


def test_a_commit_of_staged_rows_that_the_disk_refuses_is_made_by_the_next_attempt(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lake_path_of(lake.pipeline, "public.one")
    with lake.following(), lake.open_transaction() as connection:
        connection.execute("delete from one where id <= 100")
        connection.execute(FILL.format(table="one", first=10_001, last=10_000 + 3 * ROWS))
        connection.execute("update one set note = 'changed' where id between 200 and 300")
        lake.wait_rows_staged(ROWS)
        with monkeypatch.context() as broken:
            broken.setattr(storage, "put_if_absent", _refusing(log_path(table)))
            connection.commit()
            until(lambda: lake.said("public.one: attempt 2 failed"), "it is tried again")
            names = map(os.path.basename, lake.staged)
            linked = {name for name in names if storage.exists(os.path.join(table, name))}
        lake.published()
        assert linked, "it failed before rows were linked"
        assert linked <= {file.path for file in read_snapshot(table).files.values()}
        assert lake.said("public.one: no longer tried again")
        assert lake.said("public.one: of transaction")
        assert not lake.said("as if nothing had been staged")


def test_values_that_only_the_lake_knows_and_truncates_are_left_to_the_commit(lake: Lake) -> None:
    lake.database.execute("alter table two alter note set storage external")
    lake.database.execute("update two set note = repeat(md5(id::text), 100) where id < 100")
    with lake.following(), lake.open_transaction() as connection:
        connection.execute("update two set id = -id where id < 100")  # its note comes as unchanged
        connection.execute(FILL.format(table="two", first=10_001, last=10_000 + ROWS))
        connection.execute(FILL.format(table="one", first=10_001, last=10_000 + ROWS))
        lake.wait_staged()
        connection.execute("truncate one")
        connection.execute(FILL.format(table="one", first=1, last=2000))
        connection.commit()
        lake.published()
        assert lake.said("large values that the log does not carry")
        assert not lake.said("public.one: of transaction")


@pytest.mark.parametrize("staged", [False, True])
def test_ten_large_interleaved_transactions_of_which_half_abort_are_applied_in_parts(
    lake: Lake, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net_effect, "PART_CHANGES", 2000)  # of the driver, not of the stager
    if not staged:
        monkeypatch.setattr(decide.Worth, "try_next", lambda worth: False)
    with lake.following(), contextlib.ExitStack() as stack:
        writers = [stack.enter_context(lake.database.connect(autocommit=False)) for _ in range(10)]
        for part in range(2):
            for number, writer in enumerate(writers):
                first = (1 + number) * 100_000 + part * 50_000
                table = "one" if number < 5 else "two"
                writer.execute(FILL.format(table=table, first=first, last=first + ROWS // 4))
                if part:
                    writer.execute(f"update {table} set id = id + 30000 where id between {first} and {first + 500}")
        if staged:
            lake.wait_rows_staged(ROWS)
        for number, writer in enumerate(writers):
            if number % 2:
                writer.rollback()
            else:
                writer.commit()
        lake.published()
        assert bool(lake.said("were staged before its commit")) == staged


def test_a_stager_that_dies_takes_nothing_with_it(lake: Lake) -> None:
    with lake.following(), lake.open_transaction() as connection:
        connection.execute(FILL.format(table="one", first=10_001, last=10_000 + ROWS))
        lake.wait_staged()
        os.kill(stager(), signal.SIGKILL)
        connection.execute(FILL.format(table="one", first=40_001, last=40_000 + ROWS))
        connection.commit()
        lake.published()
        assert lake.said("the stager process died")


def test_what_a_driver_staged_that_died_is_removed_by_the_next_one_and_staged_anew(lake: Lake) -> None:
    more = 100_000  # above what a driver stages from when nobody says otherwise
    with lake.open_transaction() as connection:
        with Job(lake.pipeline, "replicate", as_users_do=True) as job:
            connection.execute(FILL.format(table="one", first=10_001, last=10_000 + more))
            until(lambda: lake.staged or job.process.poll() is not None, "rows are staged")
            everyone = {job.pid: "driver", **job.family}
            with_pandas = [everyone[pid] for pid in everyone if "/pandas/" in Path(f"/proc/{pid}/maps").read_text()]
            assert not with_pandas, "half a second of each start"
            os.kill(job.pid, signal.SIGKILL)
            until(lambda: not job.left, f"nothing is left of it: {job.left}")
        left = set(lake.staged)
        assert left, job.log[-3000:]
        with lake.following():
            assert not left & set(lake.staged)
            # The server sends an open transaction from before the confirmed position with its next change.
            connection.execute(FILL.format(table="one", first=200_001, last=200_000 + ROWS))
            lake.wait_rows_staged(more)
            connection.commit()
            lake.published()
            assert lake.said("public.one: of transaction")


def _refusing(log: str) -> Callable[[str, bytes], str]:
    """`storage.put_if_absent` on a disk that refuses entries of this log."""
    real = storage.put_if_absent

    def put_if_absent(place: str, data: bytes) -> str:
        if os.path.dirname(place) == log:
            raise OSError(errno.EIO, "Input/output error", place)
        return real(place, data)

    return put_if_absent


def stager() -> int:
    """The process that works for the driver in this one."""
    (found,) = [child.pid for child in multiprocessing.active_children() if child.name == "headwater-stager"]
    assert found is not None
    return found
