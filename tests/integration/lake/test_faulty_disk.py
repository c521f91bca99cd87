"""A disk that did not take what was written says so once, and the kernel shows it as if it were there.

Whoever was told ends; nobody confirms what is not on the disk, and the next start reads it from there.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Event

import pytest

from fixtures.faulty_disk import FaultyDisk, faulty_disk
from fixtures.hand_tables import HandTable
from fixtures.jobs import Job, assert_equal, catch_up, lake_rows, until
from fixtures.lakes import HandLake, position_at
from fixtures.loaded import loaded_pipeline
from fixtures.postgres import Database
from fixtures.power_cut import CannotCut
from headwater.delta import disk as local_disk
from headwater.delta import storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import entries_of, log_path
from headwater.delta.log_files import look
from headwater.gate import recovery, torn_logs
from headwater.lake.ledger import read_epoch
from headwater.lake.registry import Registry
from headwater.maintain.cleanup import clean

TABLE = "public.a"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyDisk]:
    monkeypatch.setattr(local_disk, "_disks", {})
    with contextlib.ExitStack() as undo:
        try:
            made = undo.enter_context(faulty_disk())
        except CannotCut as missing:
            pytest.skip(str(missing))
        yield made
        for known in local_disk._disks.values():
            known.close()  # or this process holds it


def somebody_else_syncs(disk: FaultyDisk) -> int:
    return subprocess.run(["sync", "--file-system", disk.path], check=False, capture_output=True).returncode


def from_the_disk(root: Path) -> None:
    """What is read from now on is what would be there after a power cut."""
    storage.sync(str(root))
    storage.forget(*(str(path) for path in root.rglob("*") if path.is_file()))


def test_a_job_learns_what_others_were_told_and_its_syncs_fail_from_then_on(disk: FaultyDisk) -> None:
    root, written = str(disk.path), disk.path / "written"
    storage.watch_disk(root)
    storage.write(str(written), b"content")
    disk.fails()
    assert somebody_else_syncs(disk) != 0
    assert somebody_else_syncs(disk) == 0, "the kernel says it once"
    with pytest.raises(OSError, match="No space left"):
        storage.sync(root)
    disk.works()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            storage.sync(root)
        with pytest.raises(OSError, match="No space left"):
            storage.sync_files(str(written))
    storage.watch_disk(root)  # another job
    storage.sync(root)
    assert storage.read(str(written)) == b"content"
    storage.forget(str(written))
    assert storage.read(str(written)) != b"content"


def test_the_next_start_takes_away_what_the_disk_did_not_take(disk: FaultyDisk) -> None:
    root = disk.path / "lake"
    table, lake = HandTable(root / "public" / "a"), HandLake(root, position_at(), [TABLE])
    for lsn in (0x1100, 0x1200):
        table.commit(table.write(3))
        lake.publish(lsn, TABLE)
    storage.sync(str(root))
    table.commit(table.write(3))
    lake.publish(0x1300, TABLE)
    disk.fails()
    assert somebody_else_syncs(disk) != 0
    disk.works()
    newest = read_epoch(lake.root)
    assert newest is not None
    assert newest.position.lsn == 0x1300, "the kernel shows it"

    recovery.mend_control_tables(lake.root)
    registry = Registry.open(lake.root, "shop")
    assert registry is not None
    assert recovery.mend(lake.root, "shop", registry.tables.values(), 0x1200) == {}
    newest = read_epoch(lake.root)
    assert newest is not None
    assert (newest.position.lsn, newest.tables[TABLE].version) == (0x1200, 2)
    assert entries_of(storage.names(log_path(str(table.folder)))) == [0, 1, 2]


def test_entries_stay_whose_checkpoint_the_disk_did_not_take(disk: FaultyDisk) -> None:
    table = HandTable(disk.path / "a")
    for _ in range(3):
        table.commit(table.write(3))
    storage.sync(str(disk.path))
    disk.fails()
    with pytest.raises(OSError, match="No space left"):
        table.checkpoint()
    somebody_else_syncs(disk)
    disk.works()
    folder = str(table.folder)
    with pytest.raises(OSError, match="not on the disk"):
        clean(folder, look(folder), table.version, log_from=table.version, orphans_before=None, stop=Event())
    torn_logs.drop_torn_checkpoints(folder)
    from_the_disk(disk.path)
    assert len(read_snapshot(folder).files) == 3


@pytest.mark.postgres
def test_a_driver_whose_disk_failed_ends_and_the_next_one_brings_again_what_is_not_there(
    disk: FaultyDisk, database: Database
) -> None:
    database.allow_publishing()
    database.execute("create table notes (id int primary key, note text)")
    pipeline = loaded_pipeline(disk.path, database, "public.notes")
    with Job(pipeline, "replicate") as job:
        database.execute("insert into notes values (0, 'before')")
        until(lambda: lake_rows(pipeline, "public.notes") or job.process.poll() is not None, "the driver works")
        disk.fails()
        for number in count(1):
            if job.process.poll() is not None:
                break
            database.execute(f"insert into notes values ({number}, repeat('x', 1000))")
            somebody_else_syncs(disk)
        disk.works()
        assert job.process.returncode == 1, job.log
        assert job.result["error"]["code"] == "lake_unavailable"
    catch_up(pipeline)
    assert_equal(database, pipeline, "public.notes")
    from_the_disk(Path(pipeline.lake_path()))
    assert_equal(database, pipeline, "public.notes")
