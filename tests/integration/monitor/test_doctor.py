"""Real sicknesses of one pipeline on a real server, each named by `doctor` with its cure; the cure is then taken."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.jobs import Job, catch_up, following, load_tables
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database
from fixtures.waiting import until
from headwater.cli import main
from headwater.lake.paths import loads_path
from headwater.maintain.maintain import maintain
from headwater.monitor.status import status
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.pausing import pause, resume

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

ORDERS, LINES = "public.orders", "public.lines"


class Patient:
    """One pipeline for all tests, healthy at the beginning of each."""

    def __init__(self, database: Database, pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
        self.database, self.pipeline, self.file = database, pipeline, pipeline.file
        self._capsys = capsys

    def examined(self, expected: int, file: str = "") -> dict[str, Any]:
        """What doctor says, with the exit status `expected`; it must have changed nothing, here or there."""
        before = self._everything()
        assert main(["doctor", file or self.file, "--json"]) == expected, self._capsys.readouterr()
        said: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        assert self._everything() == before
        return said

    def finding(self, expected: int, code: str, file: str = "") -> dict[str, Any]:
        """The one with `code`."""
        by_code = {finding["code"]: finding for finding in self.examined(expected, file)["findings"]}
        assert code in by_code
        found: dict[str, Any] = by_code[code]
        return found

    def first(self, expected: int, code: str) -> dict[str, Any]:
        """The most urgent finding, which has `code`."""
        found: dict[str, Any] = self.examined(expected)["findings"][0]
        assert found["code"] == code
        return found

    def _everything(self) -> object:
        root = Path(self.pipeline.lake_path())
        # How far a load is, a load that runs says once a second.
        living = Path(loads_path(str(root)))
        files = {
            path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and living not in path.parents
        }
        slots = "select slot_name, confirmed_flush_lsn, restart_lsn, active from pg_replication_slots"
        return files, self.database.query(slots) if self.database.server.running else None

    def load_again(self) -> None:
        load_tables(self.pipeline, again=True)
        catch_up(self.pipeline)


@pytest.fixture(scope="module")
def loaded(
    shared_database: Database, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Database, Pipeline]:
    for name in (ORDERS, LINES):
        shared_database.execute(f"create table {name} (id int primary key, n int)", f"insert into {name} values (1, 1)")
    shared_database.execute("create table unheard (note text)")
    pipeline = pipeline_in_step(tmp_path_factory.mktemp("doctor"), shared_database, ORDERS, LINES)
    return shared_database, pipeline


@pytest.fixture
def patient(loaded: tuple[Database, Pipeline], capsys: pytest.CaptureFixture[str]) -> Patient:
    return Patient(*loaded, capsys)


def test_of_a_healthy_pipeline_nothing_is_wrong_and_three_points_stand_side_by_side(
    patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    with following(patient.pipeline):
        until(lambda: status(patient.pipeline)["running"], "the driver reads the slot")
        assert main(["doctor", patient.file, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert main(["doctor", patient.file]) == 0
        shown = capsys.readouterr().out
    # The server of the tests sets no bound on the log that it keeps.
    assert [finding["code"] for finding in said["findings"]] == ["slot_wal_unlimited"]
    assert said["running"]
    assert "a replicate driver is alive" in said["in_order"]
    assert "2 of 2 tables are active" in said["in_order"]
    positions = said["positions"]
    assert positions["ledger"]["generation"] >= 1
    assert positions["slot"]["confirmed_lsn"]
    assert positions["applied"].keys() == {ORDERS, LINES}
    for text in ("the source's log ends at", "ledger, epoch", "slot, confirmed up to", "OK: "):
        assert text in shown


def test_a_driver_that_was_killed_is_to_be_started_again(patient: Patient, spark: SparkSession) -> None:
    with Job(patient.pipeline, "replicate", spark=spark) as job:
        until(lambda: status(patient.pipeline)["running"], "the driver reads the slot")
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        until(lambda: not status(patient.pipeline)["running"], "the server has noticed")
    found = patient.first(1, "not_running")
    assert "nobody reads the slot" in found["evidence"]
    assert found["remedy"].startswith(f"headwater replicate {patient.file}")


@pytest.mark.parametrize("prepared", [False, True], ids=["open", "prepared"])
def test_a_transaction_that_holds_the_log_back_is_named_with_the_statement_that_ends_it(
    patient: Patient, prepared: bool
) -> None:
    with _forgotten(patient.database, prepared) as pid:
        patient.database.execute("insert into unheard select repeat('x', 1000) from generate_series(1, 24 * 1024)")
        with following(patient.pipeline):
            until(lambda: _confirmed_far_past_restart(patient), "the driver has confirmed what came after it")
        until(lambda: not status(patient.pipeline)["slot"]["active"], "the server has noticed that it has ended")
        found = patient.finding(1, "open_transaction")
    assert "the slot restarts at" in found["evidence"]
    if prepared:
        assert "ROLLBACK PREPARED 'it''s me'" in found["remedy"]
    else:
        assert f"process {pid} " in found["message"]
        assert found["remedy"].endswith(f"SELECT pg_terminate_backend({pid})")
    assert "open_transaction" not in {finding["code"] for finding in patient.examined(1)["findings"]}


@contextlib.contextmanager
def _forgotten(database: Database, prepared: bool) -> Iterator[int]:
    """A transaction that has written something and does not end; the process that it was begun in."""
    with database.superuser(autocommit=False) as connection:
        connection.execute("insert into unheard values ('forgotten')")
        try:
            if prepared:
                connection.execute("prepare transaction 'it''s me'")
            yield connection.info.backend_pid
        finally:
            connection.rollback()
            if prepared:
                connection.autocommit = True
                connection.execute("rollback prepared 'it''s me'")


def _confirmed_far_past_restart(patient: Patient) -> bool:
    # What the server may let go of is looked at where it notes the running transactions, as a checkpoint does.
    with patient.database.superuser() as connection:
        connection.execute("checkpoint")
    far = "select confirmed_flush_lsn - restart_lsn > 20 * 1024 * 1024 from pg_replication_slots where slot_name = '{}'"
    return bool(patient.database.query(far.format(patient.pipeline.source.slot))[0][0])


def test_a_suspended_table_is_named_with_its_reason_and_the_command_that_cures_it(patient: Patient) -> None:
    patient.database.execute("drop table lines", "create table lines (id int primary key, n int)")
    found = patient.finding(4, "suspended")
    assert found["where"] == LINES
    assert "dropped and created again" in found["message"]
    assert found["remedy"] == f"headwater load {patient.file} --table {LINES} --again"
    load_tables(patient.pipeline, LINES, again=True)
    catch_up(patient.pipeline)
    assert "suspended" not in {finding["code"] for finding in patient.examined(1)["findings"]}


def test_of_a_pipeline_whose_source_is_down_the_lake_alone_is_told(patient: Patient) -> None:
    patient.database.server.stop("immediate")
    try:
        said = patient.examined(1)
    finally:
        patient.database.server.start()
    assert [finding["code"] for finding in said["findings"]] == ["source_unreachable", "not_running"]
    assert "check that the server runs" in said["findings"][0]["remedy"]
    assert said["positions"]["slot"] is None
    assert said["positions"]["ledger"]["lsn"]
    assert said["positions"]["applied"].keys() == {ORDERS, LINES}


def test_a_pause_is_not_taken_for_a_dead_driver(patient: Patient) -> None:
    pause(patient.pipeline)
    try:
        said = patient.examined(0)
    finally:
        resume(patient.pipeline)
    found = next(finding for finding in said["findings"] if finding["code"] == "paused")
    assert found["remedy"] == f"headwater resume {patient.file}"
    assert "not_running" not in {finding["code"] for finding in said["findings"]}


def test_small_files_that_nobody_gathers_are_told_until_maintain_has(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.monitor.findings._MANY_FILES", 4)
    for number in range(4):
        patient.database.execute(f"insert into lines values ({100 + number}, 1)")
        catch_up(patient.pipeline)
    found = patient.finding(1, "small_files")
    assert LINES in found["where"]
    assert found["remedy"].startswith(f"headwater maintain {patient.file}")
    maintain(patient.pipeline)
    assert "small_files" not in {finding["code"] for finding in patient.examined(1)["findings"]}


def test_log_past_the_ceiling_is_told_and_the_slot_is_left_where_it_is(patient: Patient, tmp_path: Path) -> None:
    text = Path(patient.file).read_text()
    low = tmp_path / "low.yaml"
    low.write_text(text.replace("source:\n", "source:\n  wal_ceiling: 1MiB\n"))
    patient.database.execute("insert into unheard select repeat('x', 1000) from generate_series(1, 4096)")
    found = patient.finding(2, "wal_ceiling", str(low))
    assert "source.wal_ceiling" in found["message"]
    assert found["remedy"] == f"headwater replicate {low}"


def test_a_table_whose_load_was_killed_is_to_be_loaded(patient: Patient, spark: SparkSession, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    arguments = ["--again", "--table", ORDERS]
    with Job(patient.pipeline, "load", *arguments, failpoint=f"load.after_capture=hold:{hold}", spark=spark) as job:
        until(lambda: hold.with_name("hold.held").exists(), "the load stands still")
        [lease] = [lease for lease in patient.examined(1)["leases"] if lease["name"] == "load"]
        assert (lease["pid"], lease["alive"]) == (job.pid, True)
    until(lambda: "loading" in {f["code"] for f in patient.examined(1)["findings"]}, "its session has ended")
    found = patient.finding(1, "loading")
    assert (found["where"], found["remedy"]) == (ORDERS, f"headwater load {patient.file}")
    load_tables(patient.pipeline)
    catch_up(patient.pipeline)


@pytest.fixture
def advanced(patient: Patient) -> None:
    patient.database.execute("insert into orders values (2, 2)")
    with patient.database.superuser() as connection:
        advance = "select pg_replication_slot_advance(%s, pg_current_wal_lsn())"
        connection.execute(advance, [patient.pipeline.source.slot])


@pytest.fixture
def dropped(patient: Patient) -> None:
    with patient.database.superuser() as connection:
        connection.execute("select pg_drop_replication_slot(%s)", [patient.pipeline.source.slot])


@pytest.mark.usefixtures("advanced")
def test_a_slot_that_was_moved_by_hand_has_lost_changes(patient: Patient) -> None:
    found = patient.first(2, "slot_gap")
    assert "another program has read from the slot, or moved it" in found["message"]
    assert "past the ledger's" in found["evidence"]
    assert found["remedy"].startswith(f"headwater verify {patient.file} --repair")
    patient.load_again()
    assert patient.first(1, "not_running")


@pytest.mark.usefixtures("dropped")
def test_a_slot_that_was_dropped_has_lost_changes(patient: Patient) -> None:
    found = patient.first(4, "slot_gap")
    assert "the slot does not exist any more" in found["message"]
    assert found["remedy"].startswith(f"headwater verify {patient.file} --repair")
    patient.load_again()
    assert patient.first(1, "not_running")
