"""SIGTERM and Ctrl-C end a driver with a JVM of its own in order: the result is printed, nothing is left of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.bank import Bank, leave_to_spark, replicated_bank, writing
from fixtures.jobs import JVM, Hold, Job, catch_up, until
from headwater.demo.postgres import EmbeddedServer
from headwater.lake.position_file import read_position_file
from headwater.position import parse_lsn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


def _terminate(pid: int) -> None:
    """As Airflow or systemd: the signal goes to the driver alone."""
    os.kill(pid, signal.SIGTERM)


def _press_ctrl_c(pid: int) -> None:
    """As a terminal: to the driver, its reader and its JVM."""
    os.killpg(pid, signal.SIGINT)


@pytest.fixture(scope="module")
def bank(postgres: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    with replicated_bank(postgres, tmp_path_factory.mktemp("bank"), seed=23) as bank:
        leave_to_spark(bank.pipeline)
        yield bank


def _assert_clean_stop(bank: Bank, job: Job) -> None:
    assert job.wait() == 0, job.log[-3000:]
    assert job.result["stopped_by"] == "signal"
    assert parse_lsn(job.result["position"]["lsn"]) == bank.epochs()[-1].position.lsn
    until(lambda: not job.left, f"nothing is left of its process group: {job.left}", 20)


def test_under_load_it_finishes_its_batch_and_ends_with_its_jvm(bank: Bank) -> None:
    before = bank.epoch
    with Job(bank.pipeline, "replicate", as_users_do=True) as job:
        with writing(bank.database, seed=7, pace=0.1):
            until(lambda: bank.epoch > before or job.process.poll() is not None, "it publishes", 300)
            assert job.child(JVM), "a JVM of its own"
            _terminate(job.pid)
            _assert_clean_stop(bank, job)
        assert job.result["epochs"] > 0
    catch_up(bank.pipeline)
    bank.assert_exact()


def test_ctrl_c_is_a_clean_stop_and_a_jvm_that_does_not_answer_is_killed(bank: Bank) -> None:
    catch_up(bank.pipeline)
    before = bank.epoch
    with Job(bank.pipeline, "replicate", as_users_do=True) as job:
        bank.writer.write(5)
        until(lambda: bank.epoch > before or job.process.poll() is not None, "it publishes", 300)
        until(lambda: _is_idle(bank), "it has nothing to do")
        os.kill(job.child(JVM), signal.SIGSTOP)
        # PySpark's own handler of Ctrl-C would ask the JVM to cancel its jobs, and wait for its answer.
        _press_ctrl_c(job.pid)
        _assert_clean_stop(bank, job)
        assert "did not end and is killed" in job.log
    bank.assert_exact()


def _is_idle(bank: Bank) -> bool:
    """Whether what the writer wrote is in the lake, so that the driver asks nothing of its JVM."""
    file = read_position_file(bank.pipeline.lake_path())
    return file is not None and not file.pending and file.read_position > bank.epochs()[-1].position.lsn


def test_before_the_jvm_starts_none_is_started(bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_JARS", str(tmp_path / "none"))  # whoever starts a session now fails
    bank.writer.write(5)
    hold = Hold(tmp_path / "hold")
    with Job(bank.pipeline, "replicate", failpoint=f"replicate.after_generation={hold.action}") as job:
        until(lambda: hold.is_reached or job.process.poll() is not None, "it holds the slot")
        _terminate(job.pid)
        hold.release()
        _assert_clean_stop(bank, job)
