"""Whose a failure is: one table's, which is tried again and suspended at last, or the driver's, which ends."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JError

from headwater.errors import Fenced, HeadwaterError, KeepsChanging, SourceUnreachable, TableError, Transient
from headwater.lake.paths import CONTROL
from headwater.replicate.batches.retries import Retries, TryAgain, reason_of

TABLES = ("a", "b")


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / CONTROL).mkdir()
    return str(tmp_path)


OWN = [OSError(errno.EIO, "Input/output error"), MemoryError(), KeyError("x"), KeepsChanging.during(5, "a")]


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
def test_a_failure_of_one_table_is_tried_again_at_growing_pauses(root: str, error: Exception) -> None:
    retries = Retries(root, 100)
    pauses = []
    for _ in range(6):
        with pytest.raises(TryAgain) as again:
            retries.failed("a", error, TABLES)
        pauses.append(again.value.seconds)
    assert pauses == [0.5, 1, 2, 4, 5, 5]
    assert retries.shown()["a"]["attempts"] == 6
    retries.passed("a")
    assert not retries.shown()
    assert list((Path(root) / CONTROL).iterdir()) == []


def test_without_time_a_table_is_suspended_at_its_first_failure(root: str) -> None:
    error = Retries(root, 0).failed("a", OSError(errno.EIO, "Input/output error"), TABLES)
    assert isinstance(error, TableError)
    assert error.code == "keeps_failing"
    assert "1 attempt: OSError" in error.message


def test_in_a_store_a_table_has_some_attempts_though_each_takes_longer_than_all_of_them_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    retries, now = Retries("s3://bucket/lake", 60), 0.0
    monkeypatch.setattr(retries, "_probe", lambda: None)
    monkeypatch.setattr("headwater.replicate.batches.retries.time.monotonic", lambda: now)
    away = OSError(errno.EIO, "Generic S3 error", "s3://bucket/lake/public/a")
    for _ in range(3):
        with pytest.raises(TryAgain):
            retries.failed("a", away, TABLES)
        now += 374  # what is asked for 75 s, and a large request of five minutes
    now += 10
    assert isinstance(retries.failed("a", away, TABLES), TableError)


NOT_OWN = [
    Fenced("x"),
    SourceUnreachable("x"),
    psycopg.OperationalError("x"),
    Transient("silent"),
    # What py4j says of a JVM that was killed: in the middle of a call, and ever after.
    Py4JError("An error occurred while calling o42.sql"),
    ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
]


@pytest.mark.parametrize("error", NOT_OWN, ids=lambda error: type(error).__name__)
def test_what_is_the_drivers_or_the_sources_is_no_tables(root: str, error: Exception) -> None:
    retries = Retries(root, 100)
    with pytest.raises(type(error)) as raised:
        retries.failed("a", error, TABLES)
    assert raised.value is error
    assert not retries.shown()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("java.io: No space left on device")]
)
def test_a_full_disk_is_an_outage_of_the_lake(root: str, error: Exception) -> None:
    with pytest.raises(Transient) as raised:
        Retries(root, 100).failed("a", error, TABLES)
    assert raised.value.code == "lake_full"


@pytest.mark.parametrize(("free", "code"), [((10, 5), "spill_full"), ((5, 10), "lake_full")])
def test_a_full_disk_is_the_one_with_less_room(
    root: str, monkeypatch: pytest.MonkeyPatch, free: tuple[int, int], code: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    lake, local = free
    monkeypatch.setattr(shutil, "disk_usage", lambda p: SimpleNamespace(free=local if p == "/dev/shm" else lake))
    with pytest.raises(Transient) as raised:
        Retries(root, 100).failed("a", OSError(errno.ENOSPC, "No space left on device"), TABLES)
    assert raised.value.code == code


def test_a_quota_is_the_lake_s_however_little_room_the_local_disk_has(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.log.spill.has_less_room_than", lambda folder: True)
    with pytest.raises(Transient) as raised:
        Retries(root, 100).failed("a", OSError(errno.EDQUOT, "Disk quota exceeded"), TABLES)
    assert raised.value.code == "lake_full"


def test_no_space_beside_a_lake_in_a_store_is_the_local_disk_s() -> None:
    with pytest.raises(Transient, match="TMPDIR") as raised:
        Retries("s3://bucket/lake", 100).failed("a", OSError(errno.ENOSPC, "No space left on device"), TABLES)
    assert raised.value.code == "spill_full"


def test_where_nothing_can_be_written_beside_the_ledger_the_lake_is_out(tmp_path: Path) -> None:
    with pytest.raises(Transient) as raised:
        Retries(str(tmp_path), 100).failed("a", OSError(errno.EIO, "x"), TABLES)
    assert raised.value.code == "lake_unavailable"


def test_when_every_table_fails_none_is_suspended(root: str) -> None:
    retries = Retries(root, 0)
    with pytest.raises(TryAgain):
        Retries(root, 1).failed("b", OSError(errno.EIO, "x"), TABLES)
    assert isinstance(retries.failed("b", OSError(errno.EIO, "x"), TABLES), HeadwaterError)
    with pytest.raises(Transient) as raised:
        retries.failed("a", OSError(errno.EIO, "x"), TABLES)
    assert raised.value.code == "lake_unavailable"


def test_work_that_succeeds_does_not_hide_other_work_on_the_table_that_fails(root: str) -> None:
    retries = Retries(root, 100)
    for _ in range(2):
        with pytest.raises(TryAgain):
            retries.failed("a", OSError(errno.EIO, "x"), TABLES, "reload of a")
        retries.passed("a")
    assert retries.shown()["a"]["attempts"] == 2
    assert retries.passed("reload of a")
    assert not retries.shown()


def test_a_reason_quotes_no_value_of_a_row() -> None:
    assert "hunter2" not in reason_of(ValueError("could not convert 'hunter2'"))
    assert reason_of(PermissionError(errno.EACCES, "Permission denied", "/data/x=hunter2")).endswith(
        ": Permission denied"
    )
    assert "hunter2" not in reason_of(DeltaError("no file /data/x=hunter2/part-0.parquet"))
