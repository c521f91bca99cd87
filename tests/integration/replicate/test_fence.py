"""The fence: of two drivers only the newer one publishes, whenever the older one wakes up.

The slot lets one driver read at a time, but a stopped driver loses it without knowing. It may still finish a table
commit that it had begun; it publishes no ledger row and no position file, and lake and cuts stay exact.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql

from fixtures.bank import TABLES, Bank, free_the_slot, replicated_bank
from fixtures.jobs import Hold, Job, armed, catch_up, failing, following, in_thread, lake_path_of, registry_of, until
from headwater import failpoints
from headwater.delta import storage
from headwater.delta.log_entries import log_path
from headwater.delta.small_tables import open_version
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import HeadwaterError
from headwater.lake.ledger import read_generation
from headwater.lake.paths import position_file_path
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.reload.reload import reload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def bank(
    each_store: str, postgres: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bank]:
    with replicated_bank(postgres, tmp_path_factory.mktemp("bank"), seed=11) as bank:
        yield bank


def _generation(bank: Bank) -> int:
    return read_generation(bank.pipeline.lake_path(), bank.pipeline.name)


def _position_file(bank: Bank) -> str:
    return storage.read_text(position_file_path(bank.pipeline.lake_path()))


@pytest.mark.parametrize(
    ("place", "own_jvm"), [("replicate.before_table_commit", True), ("replicate.before_ledger", False)]
)
def test_a_stopped_driver_that_wakes_up_after_its_successor_publishes_nothing(
    bank: Bank, spark: SparkSession, tmp_path: Path, place: str, own_jvm: bool
) -> None:
    """They share nothing but lake and source, as two machines do."""
    bank.writer.write(30)
    hold, jvm = Hold(bank.folder / place), None if own_jvm else spark
    with Job(bank.pipeline, "replicate", failpoint=f"{place}={hold.action}", spark=jvm, elsewhere=tmp_path) as job:
        until(lambda: hold.is_reached or job.process.poll() is not None, "the first driver stands", 120)
        stopped = [job.pid, *job.family]
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        first = _generation(bank)
        free_the_slot(bank)
        bank.writer.write(30)
        catch_up(bank.pipeline)
        published, file = bank.epochs(), _position_file(bank)
        assert published[-1].generation == _generation(bank) == first + 1
        bank.assert_exact()

        hold.release()
        for process in stopped:
            os.kill(process, signal.SIGCONT)
        status = job.wait(60)
        # Whichever it notices first: the new generation, that the slot was taken, or that the slot has moved on.
        result = job.result
        noticed = status == 1 or result.get("stopped_by") == "fenced" or result["error"]["code"] == "slot_gap"
        assert noticed, (status, result)
        assert not [epoch for epoch in bank.epochs() if epoch.generation == first and epoch not in published]
    assert bank.epochs() == published
    assert _position_file(bank) == file
    bank.assert_exact()
    bank.writer.write(10)
    catch_up(bank.pipeline)
    bank.assert_exact()


@pytest.mark.parametrize("whole", [True, False], ids=["with its reader", "alone"])
def test_a_driver_that_stood_still_while_nobody_took_its_place_goes_on(
    bank: Bank, spark: SparkSession, whole: bool
) -> None:
    with bank.database.superuser() as admin:
        admin.execute(sql.SQL("alter role {} set wal_sender_timeout = '4s'").format(sql.Identifier(bank.database.role)))
    generation = _generation(bank)
    with Job(bank.pipeline, "replicate", spark=spark) as job:
        until(lambda: _generation(bank) > generation or job.process.poll() is not None, "the driver has begun", 120)
        bank.writer.write(10)
        epochs = bank.epoch
        until(lambda: bank.epoch > epochs or job.process.poll() is not None, "it publishes")
        stopped = [job.pid, *(job.family if whole else [])]
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        bank.writer.write(10)
        time.sleep(6)  # the server ends a connection that says nothing for 4 s
        for process in stopped:
            os.kill(process, signal.SIGCONT)
        epochs = bank.epoch
        bank.writer.write(10)
        until(lambda: bank.epoch > epochs or job.process.poll() is not None, "it goes on")
        assert job.process.poll() is None, job.log[-3000:]
        assert _generation(bank) == generation + 1
    with bank.database.superuser() as admin:
        admin.execute(sql.SQL("alter role {} reset wal_sender_timeout").format(sql.Identifier(bank.database.role)))
    catch_up(bank.pipeline)
    bank.assert_exact()


# Two drivers of one process share a JVM, and with it the exact moments.


def _lose_the_slot(bank: Bank) -> None:
    """The driver of this process loses its reader, which would only connect again, and the slot with it."""
    for reader in multiprocessing.active_children():
        reader.kill()
        reader.join()
    free_the_slot(bank)


def _outcome(job: Future[Any]) -> str:
    """How an old driver ended: "fenced", or the code of the error by which it noticed."""
    error = job.exception(60)
    if error is None:
        return str(job.result()["stopped_by"])
    assert isinstance(error, HeadwaterError)
    assert error.exit_status == 1
    return error.code


def _assert_only_the_new_one_publishes(
    bank: Bank, old: Future[Any], old_hold: Hold, new: Future[Any], new_hold: Hold
) -> None:
    new_hold.reached(new)
    before = bank.epochs()
    old_hold.release()
    assert _outcome(old) in ("fenced", "source_unreachable")
    assert bank.epochs() == before
    new_hold.release()
    assert new.result(90)["stopped_by"] == "until"


def test_a_late_commit_of_what_has_come_to_nothing_since_does_not_land(bank: Bank) -> None:
    """The old driver knows of a row, the successor reads its insert and its delete, in one batch as a rule."""
    catch_up(bank.pipeline)
    with armed(bank.folder, "replicate.before_table_commit") as old_hold:
        bank.database.execute("insert into documents values (999, repeat('l', 6400), 0)")
        old = in_thread(lambda: catch_up(bank.pipeline))
        old_hold.reached(old)
        _lose_the_slot(bank)
        bank.database.execute("delete from documents where id = 999")
        del os.environ["HEADWATER_FAILPOINT"]
        catch_up(bank.pipeline)
        os.environ["HEADWATER_FAILPOINT"] = ""
        old_hold.release()
        assert _outcome(old) in ("fenced", "source_unreachable")
    catch_up(bank.pipeline)
    bank.assert_exact()


def test_a_table_commit_that_lands_after_the_successor_began_is_counted_once(bank: Bank) -> None:
    """The successor has raised the generation and not yet read the tables: it finds the late commit there."""
    bank.writer.write(30)
    with armed(bank.folder, "replicate.before_table_commit") as old_hold:
        old = in_thread(lambda: catch_up(bank.pipeline))
        old_hold.reached(old)
        _lose_the_slot(bank)
        bank.writer.write(10)
        new_hold = Hold(bank.folder / "successor")
        os.environ["HEADWATER_FAILPOINT"] += f";replicate.after_generation={new_hold.action}"
        failpoints._reached.pop("replicate.after_generation", None)
        new = in_thread(lambda: catch_up(bank.pipeline))
        _assert_only_the_new_one_publishes(bank, old, old_hold, new, new_hold)
    bank.assert_exact()


def test_a_successor_that_meets_a_late_commit_reads_the_position_and_skips(bank: Bank) -> None:
    """The successor has read the tables and is about to commit: it loses the race and plans again."""
    bank.writer.write(30)
    others = len(TABLES) - 1
    versions = {name: _version(bank, name) for name in TABLES}
    with armed(bank.folder, "replicate.before_table_commit") as old_hold:
        old = in_thread(lambda: catch_up(bank.pipeline))
        old_hold.reached(old)
        until(lambda: sum(_version(bank, name) > versions[name] for name in TABLES) == others, "all others")
        _lose_the_slot(bank)
        bank.writer.write(10)
        new_hold = Hold(bank.folder / "successor_in_apply")
        os.environ["HEADWATER_FAILPOINT"] = f"replicate.before_table_commit={new_hold.action}"
        failpoints._reached.clear()
        new = in_thread(lambda: catch_up(bank.pipeline))
        _assert_only_the_new_one_publishes(bank, old, old_hold, new, new_hold)
    bank.assert_exact()


def _version(bank: Bank, name: str) -> int:
    log = log_path(lake_path_of(bank.pipeline, name))
    return max(int(name.removesuffix(".json")) for name in storage.names(log) if re.fullmatch(r"\d+\.json", name))


def test_a_late_commit_of_a_kept_change_is_in_the_part_that_the_successor_merges(bank: Bank) -> None:
    """It lands between the successor's look at the table and its commit, before the log has delivered it again."""
    catch_up(bank.pipeline)
    documents = "public.documents"
    old_hold, merge_hold, log_hold = (Hold(bank.folder / name) for name in ("late", "merge", "log"))
    with armed(bank.folder, "reload.after_read") as read, failing(bank.pipeline) as old:
        until(lambda: status(bank.pipeline)["running"] or old.done(), "the first driver runs")
        job = in_thread(lambda: reload(bank.pipeline, TableName.parse(documents)))
        read.reached(job)
        published = bank.epochs()[-1].tables[documents].applied_lsn
        bank.database.execute("insert into documents values (998, repeat('l', 6400), 0)")
        until(
            lambda: bank.epochs()[-1].tables[documents].applied_lsn > published or old.done(),
            "a cut lies behind what was read",
        )
        late = f"replicate.before_table_commit@{documents}={old_hold.action}"
        os.environ["HEADWATER_FAILPOINT"] = late
        bank.database.execute(
            "delete from documents where id = 998; insert into documents values (997, repeat('l', 6400), 0)"
        )
        old_hold.reached(old)
        read.release()
        until(lambda: [r.state for r in registry_of(bank.pipeline).reloads.values()] == ["read"], "all was read")
        _lose_the_slot(bank)
        os.environ["HEADWATER_FAILPOINT"] = (
            f"{late};replicate.before_table_commit={merge_hold.action};replicate.before_chunk={log_hold.action}"
        )
        with following(bank.pipeline) as new:
            merge_hold.reached(new)
            stood = open_version(lake_path_of(bank.pipeline, documents)).version()
            old_hold.release()
            assert _outcome(old) in ("fenced", "source_unreachable")
            assert open_version(lake_path_of(bank.pipeline, documents)).version() == stood + 1
            merge_hold.release()
            until(
                lambda: [a.state for a in registry_of(bank.pipeline).kept.values()] == ["done"] or new.done(), "merged"
            )
            log_hold.release()
            assert job.result(120)["tables"][documents]["rows"] == 4
    catch_up(bank.pipeline)
    bank.assert_exact()
    bank.database.execute("delete from documents where id = 997")
