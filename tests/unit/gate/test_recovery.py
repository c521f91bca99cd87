"""What is left of a log when the power has gone: by hand, since a real disk loses what it likes (test_power_cut)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaError

from fixtures.hand_tables import SCHEMA, HandTable
from fixtures.lakes import HandLake, position_at, utc
from headwater.delta import disk, log_files, storage
from headwater.delta.data_files import write_batches
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import TornEntry, entries_of, files_of, log_entry, log_path, newest_whole
from headwater.delta.log_files import pointed_at
from headwater.delta.small_tables import open_table, write_checkpoint
from headwater.errors import DamagedLake
from headwater.gate import drivers, recovery, torn_logs
from headwater.lake import validations
from headwater.lake.ledger import Ledger, read_epoch, read_generation
from headwater.lake.ledger_follower import FollowedLedger
from headwater.lake.paths import ledger_path, pins_path, position_file_path, registry_path, validations_path
from headwater.lake.registry import Registry
from headwater.lake.validations import SuiteResult, TableResult, Validation
from headwater.maintain.cleanup import clean
from headwater.maintain.control_tables import keep_ledger
from headwater.monitor.recent_epochs import RecentEpochs
from headwater.position import Position
from headwater.replicate.takeover import new_source
from headwater.source.connection import ServerIdentity

A = "public.a"


@pytest.fixture
def table(tmp_path: Path) -> HandTable:
    """Versions 0 to 4; 1 to 4 have added a file each."""
    made = HandTable(tmp_path / "lake" / "public" / "a")
    for _ in range(4):
        made.commit(made.write(3))
    return made


def entry(table: HandTable, version: int) -> Path:
    return Path(log_entry(str(table.folder), version))


def file_of(table: HandTable, version: int) -> Path:
    """The data file that a version has added."""
    (added,) = (f for f in read_snapshot(str(table.folder), version).files.values() if f.name in _added(table, version))
    return table.folder / added.path


def _added(table: HandTable, version: int) -> set[str]:
    folder = str(table.folder)
    return set(read_snapshot(folder, version).files) - set(read_snapshot(folder, version - 1).files)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zeros_within(path: Path) -> None:
    """A block that the disk had not got: ends and length are as they should be."""
    content = path.read_bytes()
    path.write_bytes(content[:64] + bytes(len(content) // 2) + content[64 + len(content) // 2 :])


DAMAGES: list[Callable[[Path], None]] = [cut_short, emptied, zeros]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_entry_at_the_top_was_never_committed(table: HandTable, damage: Callable[[Path], None]) -> None:
    folder = str(table.folder)
    damage(entry(table, 4))
    assert read_snapshot(folder).version == 3, "readers pass over it"
    opened = open_table(folder)
    assert opened is not None
    assert opened.version() == 3
    loss = torn_logs.first_loss(folder, 1)
    assert loss is not None
    assert (loss.version, loss.newest) == (4, True)
    torn_logs.cut_back(folder, loss.version)
    assert entries_of(storage.names(log_path(folder))) == [0, 1, 2, 3]
    assert torn_logs.first_loss(folder, 1) is None
    table.contents.pop()
    table.commit(table.write(3))
    assert read_snapshot(folder).version == 4


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_entry_below_a_whole_one_is_no_version_without_rows(
    table: HandTable, damage: Callable[[Path], None]
) -> None:
    folder = str(table.folder)
    damage(entry(table, 3))
    with pytest.raises(TornEntry, match=entry(table, 3).name):
        read_snapshot(folder)
    assert newest_whole(folder) == 2
    loss = torn_logs.first_loss(folder, 1)
    assert loss is not None
    assert (loss.version, loss.newest) == (3, False)
    assert torn_logs.first_loss(folder, 3) is None, "below what was durable nobody looks"


@pytest.mark.parametrize("damage", [*DAMAGES, Path.unlink])
def test_a_lost_data_file_takes_the_version_that_added_it_and_those_above(
    table: HandTable, damage: Callable[[Path], None]
) -> None:
    damage(file_of(table, 3))
    loss = torn_logs.first_loss(str(table.folder), 1)
    assert loss is not None
    assert (loss.version, loss.newest) == (3, False)
    assert file_of(table, 3).name in loss.what


def test_zeros_within_a_file_are_found_where_files_are_read(table: HandTable) -> None:
    lost = file_of(table, 4)
    content = lost.read_bytes()
    lost.write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])
    assert torn_logs.first_loss(str(table.folder), 1) is None
    loss = torn_logs.first_loss(str(table.folder), 1, read=True)
    assert loss is not None
    assert loss.version == 4


def test_a_block_of_zeros_within_rows_that_do_not_compress_is_found(table: HandTable) -> None:
    rows = pa.table({"id": np.random.default_rng(4).integers(1 << 62, size=100_000)}, schema=SCHEMA)
    added = write_batches(str(table.folder), SCHEMA, [rows])
    table.commit(added)
    file = table.folder / added.path
    content = file.read_bytes()
    file.write_bytes(content[:409_600] + bytes(4096) + content[413_696:])
    loss = torn_logs.first_loss(str(table.folder), 1, read=True)
    assert loss is not None
    assert loss.version == 5


@pytest.mark.parametrize(("kind", "version"), [("entry", 4), ("vector", 5)])
def test_what_the_disk_does_not_give_back_is_as_good_as_not_there(
    table: HandTable, monkeypatch: pytest.MonkeyPatch, kind: str, version: int
) -> None:
    table.commit(gone={next(iter(sorted(table.live))): [1]})
    (vector,) = table.folder.glob("*.bin")
    refused = str(vector if kind == "vector" else entry(table, version))

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(place: str, *arguments: Any) -> Any:
            if place == refused:
                raise OSError(errno.EIO, os.strerror(errno.EIO), place)
            return real(place, *arguments)

        return read

    for name in ("read_text", "read_range"):
        monkeypatch.setattr(storage, name, refusing(getattr(storage, name)))
    loss = torn_logs.first_loss(str(table.folder), 1, read=True)
    assert loss is not None
    assert loss.version == version
    with pytest.raises(OSError, match="Input/output error"):
        torn_logs.first_loss(str(table.folder), 1)


@pytest.mark.parametrize("damage", [*DAMAGES, Path.unlink])
def test_a_lost_file_that_a_later_version_removed_is_missed_by_its_own_alone(
    table: HandTable, damage: Callable[[Path], None]
) -> None:
    lost, folder = file_of(table, 4), str(table.folder)
    table.commit(whole=lost.name)
    assert torn_logs.loss_in_between(folder, 1) is None
    damage(lost)
    assert torn_logs.first_loss(folder, 1, read=True) is None
    loss = torn_logs.loss_in_between(folder, 1)
    assert loss is not None
    assert loss.version == 4
    assert lost.name in loss.what


def test_a_file_that_comes_back_with_each_new_vector_is_read_once(
    table: HandTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(sorted(table.live)))
    for row in (0, 1, 2):
        table.commit(gone={name: [row]})
    read = list[str]()
    real = storage.is_readable

    def is_readable(place: str) -> bool:
        read.append(Path(place).name)
        return real(place)

    monkeypatch.setattr(storage, "is_readable", is_readable)
    assert torn_logs.first_loss(str(table.folder), 1, read=True) is None
    assert torn_logs.loss_in_between(str(table.folder), 1) is None
    assert read
    assert len(read) == len(set(read))


def test_where_clean_up_has_been_nothing_is_cut_back_to(table: HandTable) -> None:
    for version in (3, 4):
        gone = file_of(table, version)
        table.commit(whole=gone.name)
        gone.unlink()
    file_of(table, 2).unlink()  # live, and below what was durable
    assert torn_logs.loss_in_between(str(table.folder), 2) is None
    assert torn_logs.first_loss(str(table.folder), 2) is None


def test_a_lost_vector_takes_its_version(table: HandTable) -> None:
    table.commit(gone={next(iter(sorted(table.live))): [1]})
    (vector,) = table.folder.glob("*.bin")
    content = vector.read_bytes()
    for lost in (bytes(len(content)), bytes(1) + content[1:], content[:-1]):
        vector.write_bytes(lost)
        loss = torn_logs.first_loss(str(table.folder), 1)
        assert loss is not None
        assert loss.version == 5


@pytest.mark.parametrize("pointer", [True, False])
@pytest.mark.parametrize("damage", [*DAMAGES, zeros_within])
def test_a_torn_checkpoint_is_none(table: HandTable, damage: Callable[[Path], None], pointer: bool) -> None:
    folder = str(table.folder)
    table.checkpoint()
    damage(table.folder / "_delta_log" / f"{4:020d}.checkpoint.parquet")
    if pointer:
        emptied(table.folder / "_delta_log" / "_last_checkpoint")
    torn_logs.drop_torn_checkpoints(folder)
    assert not [name for name in table.log_files() if "checkpoint" in name]
    assert read_snapshot(folder).version == 4
    table.checkpoint()
    torn_logs.drop_torn_checkpoints(folder)
    assert len([name for name in table.log_files() if "checkpoint" in name]) == 2


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_checkpoint_is_none_where_nothing_points_at_it_yet(
    table: HandTable, damage: Callable[[Path], None], first: bool
) -> None:
    """The power went between the checkpoint and its pointer, of which the disk has nothing, or the one before."""
    folder, pointer = str(table.folder), table.folder / "_delta_log" / "_last_checkpoint"
    table.checkpoint()
    before = pointer.read_text()
    for version in (5, 6):
        table.commit(table.write(version))
        table.checkpoint()
    pointer.write_text(before)
    if first:
        pointer.unlink()
    for version in (5, 6):
        damage(table.folder / "_delta_log" / f"{version:020d}.checkpoint.parquet")
    torn_logs.drop_torn_checkpoints(folder)
    assert [name for name in table.log_files() if "checkpoint." in name] == [f"{4:020d}.checkpoint.parquet"]
    assert pointer.exists() != first
    assert read_snapshot(folder).version == 6


@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_that_a_driver_makes_meanwhile_keeps_its_pointer(
    table: HandTable, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Before or behind the look at the names; that look may also have missed that clean-up took the older one."""
    table.checkpoint()
    table.commit(table.write(3))
    names, made = storage.names, list[int]()

    def meanwhile(folder: str) -> list[str]:
        found = names(folder)
        if not made:
            made.append(0)
            table.checkpoint()
            return found if before else [name for name in names(folder) if not name.startswith(f"{4:020d}.checkpoint")]
        return found

    monkeypatch.setattr(storage, "names", meanwhile)
    torn_logs.drop_torn_checkpoints(str(table.folder))
    assert pointed_at(str(table.folder)) == 5


def test_a_checkpoint_goes_with_the_checksum_that_spark_has_put_beside_it(table: HandTable) -> None:
    """Spark would compare the next one there with it, whoever wrote that."""
    table.checkpoint()
    log = table.folder / "_delta_log"
    checkpoint, checksum = (log / f"{dot}{4:020d}.checkpoint.parquet{end}" for dot, end in (("", ""), (".", ".crc")))
    checksum.write_bytes(b"of another")
    emptied(checkpoint)
    torn_logs.drop_torn_checkpoints(str(table.folder))
    assert not checksum.exists()
    checksum.write_bytes(b"of another")
    table.checkpoint()
    assert checkpoint.exists()
    assert not checksum.exists()


def test_a_checkpoint_that_the_disk_does_not_give_back_for_a_moment_stays(
    table: HandTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.checkpoint()
    before, read_range = table.log_files(), storage.read_range

    def refuse(place: str, *of: Any) -> bytes:
        if ".checkpoint." in place:
            raise OSError(errno.EIO, os.strerror(errno.EIO), place)
        return read_range(place, *of)

    monkeypatch.setattr(storage, "read_range", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        torn_logs.drop_torn_checkpoints(str(table.folder))
    assert table.log_files() == before


def test_checkpoints_that_the_disk_has_for_sure_are_not_read(table: HandTable) -> None:
    """With thousands of tables that would be most of a start."""
    table.checkpoint()
    checkpoint = table.folder / "_delta_log" / f"{4:020d}.checkpoint.parquet"
    zeros_within(checkpoint)
    os.utime(checkpoint, (1000, 1000))  # whole seconds: any other moment is rounded in more ways than one
    for since, stays in ((1001, True), (1000, False)):
        assert torn_logs.drop_torn_checkpoints(str(table.folder), since) == ""
        assert checkpoint.exists() == stays


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_whose_entries_are_gone_is_never_taken_away(
    table: HandTable, damage: Callable[[Path], None]
) -> None:
    table.checkpoint()
    entry(table, 0).unlink()
    checkpoint = table.folder / "_delta_log" / f"{4:020d}.checkpoint.parquet"
    damage(checkpoint)
    assert torn_logs.drop_torn_checkpoints(str(table.folder)) == str(checkpoint)
    assert checkpoint.exists()


def test_a_torn_checkpoint_below_a_whole_one_stands_for_nothing_that_is_read(table: HandTable) -> None:
    table.checkpoint()
    table.commit(table.write(5))
    table.checkpoint()
    entry(table, 0).unlink()
    emptied(table.folder / "_delta_log" / f"{4:020d}.checkpoint.parquet")
    assert torn_logs.drop_torn_checkpoints(str(table.folder)) == ""
    assert [name for name in table.log_files() if "checkpoint." in name] == [f"{5:020d}.checkpoint.parquet"]
    assert read_snapshot(str(table.folder)).version == 5


def test_a_checkpoint_that_may_go_goes_though_another_one_stays(table: HandTable) -> None:
    for version in (4, 5, 6):
        if version > 4:
            table.commit(table.write(version))
        table.checkpoint()
    for version in (5, 6):
        emptied(table.folder / "_delta_log" / f"{version:020d}.checkpoint.parquet")
    entry(table, 6).unlink()
    stays = torn_logs.drop_torn_checkpoints(str(table.folder))
    assert stays.endswith(f"{6:020d}.checkpoint.parquet")
    assert len([name for name in table.log_files() if "checkpoint." in name]) == 2


def test_of_the_registry_such_a_checkpoint_is_damage_and_of_validations_nothing(lake: HandLake) -> None:
    validations = lake.root + "/_headwater/validations"
    shutil.copytree(registry_path(lake.root), validations)
    for folder in (validations, registry_path(lake.root)):
        version = write_checkpoint(folder)
        Path(log_entry(folder, 0)).unlink()
        zeros_within(Path(log_path(folder, f"{version:020d}.checkpoint.parquet")))
        if folder == validations:
            recovery.mend_control_tables(lake.root)
            assert not Path(validations).exists()
    with pytest.raises(DamagedLake, match="the entries that it stands for are gone"):
        recovery.mend_control_tables(lake.root)


def test_a_checkpoint_that_clean_up_takes_meanwhile_is_no_error(
    table: HandTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.checkpoint()
    read_range = storage.read_range

    def read(place: str, *of: Any) -> bytes:
        if ".checkpoint." in place:
            storage.delete(place)
        return read_range(place, *of)

    monkeypatch.setattr(storage, "read_range", read)
    assert torn_logs.drop_torn_checkpoints(str(table.folder)) == ""


def test_what_cannot_be_looked_at_is_not_taken_for_torn(table: HandTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: str, **_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), place)

    monkeypatch.setattr(storage, "parquet_file", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        torn_logs.first_loss(str(table.folder), 1, read=True)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_of_a_version_that_the_disk_did_not_have_yet_is_none(
    table: HandTable, damage: Callable[[Path], None]
) -> None:
    folder = str(table.folder)
    table.checkpoint()
    damage(entry(table, 4))
    torn_logs.drop_torn_checkpoints(folder)
    loss = torn_logs.first_loss(folder, torn_logs.base(folder))
    assert loss is not None
    assert (loss.version, loss.newest) == (4, True)
    torn_logs.cut_back(folder, loss.version)
    assert read_snapshot(folder).version == 3
    assert not entry(table, 4).exists()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("version", [2, 4])
def test_no_checkpoint_is_made_above_a_torn_entry(
    table: HandTable, damage: Callable[[Path], None], version: int
) -> None:
    """It would be taken for a version that changed nothing, and no start would look at it again."""
    damage(entry(table, version))
    with pytest.raises(TornEntry, match=entry(table, version).name):
        write_checkpoint(str(table.folder))
    assert not [name for name in table.log_files() if "checkpoint" in name]


def test_what_a_checkpoint_stands_for_is_on_disk_before_it(table: HandTable, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(storage, "sync", lambda folder: synced.append(sorted(table.log_files())))
    assert write_checkpoint(str(table.folder)) == 4
    (before,) = synced
    assert f"{4:020d}.json" in before
    assert f"{4:020d}.checkpoint.parquet" not in before


def test_what_takes_the_place_of_what_goes_is_on_disk_before(table: HandTable, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = file_of(table, 4).name
    table.commit(whole=gone)
    table.checkpoint()
    folder, calls = str(table.folder), list[str]()
    real_sync, real_delete = storage.sync, storage.delete_files

    def sync(root: str) -> None:
        calls.append("sync")
        real_sync(root)

    def delete(folder: str, paths: Sequence[str]) -> None:
        calls.extend(Path(path).name for path in paths)
        real_delete(folder, paths)

    monkeypatch.setattr(storage, "sync", sync)
    monkeypatch.setattr(storage, "delete_files", delete)
    clean(folder, log_files.look(folder), 5, log_from=5, orphans_before=None, stop=Event())
    assert calls[0] == "sync"
    assert gone in calls
    assert f"{0:020d}.json" in calls


# The lake


@pytest.fixture
def lake(table: HandTable) -> HandLake:
    """Three epochs at 0x1100, 0x1200 and 0x1300, of versions 1 to 3; the third is not durable."""
    made = HandLake(table.folder.parents[1], position_at(), [A])
    for lsn in (0x1100, 0x1200, 0x1300):
        made.publish(lsn, A)
    return made


def mended(lake: HandLake, confirmed: int = 0x1200) -> dict[str, str]:
    recovery.mend_control_tables(lake.root)
    registry = Registry.open(lake.root, "shop")
    assert registry is not None
    return recovery.mend(lake.root, "shop", registry.tables.values(), confirmed)


def test_a_lake_that_is_whole_stays_as_it_is(lake: HandLake, table: HandTable) -> None:
    before = {path: path.read_bytes() for path in Path(lake.root).rglob("*") if path.is_file()}
    assert mended(lake) == {}
    after = {path: path.read_bytes() for path in Path(lake.root).rglob("*") if path.is_file()}
    assert not after.keys() - before.keys()
    assert all(after[path] == content for path, content in before.items())


def test_where_syncs_go_by_names_what_another_process_has_written_is_synced_before_it_counts(
    lake: HandLake, table: HandTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_is_synced_as_a_whole", lambda folder: False)
    synced: set[str] = set()
    real = disk.sync_files

    def sync_files(*paths: str) -> None:
        synced.update(paths)
        real(*paths)

    monkeypatch.setattr(disk, "sync_files", sync_files)
    assert mended(lake) == {}
    ledger = ledger_path(lake.root)
    row = entries_of(storage.names(log_path(ledger)))[-1]
    assert synced >= {*files_of(ledger, row), str(entry(table, 3)), str(file_of(table, 3)), str(file_of(table, 4))}
    assert str(file_of(table, 2)) not in synced


def test_rows_that_name_a_version_that_is_gone_go_and_so_does_the_position_file(
    lake: HandLake, table: HandTable
) -> None:
    emptied(entry(table, 3))
    emptied(entry(table, 4))
    assert mended(lake) == {}
    newest = read_epoch(lake.root)
    assert newest is not None
    assert (newest.epoch, newest.position.lsn, newest.tables[A].version) == (2, 0x1200, 2)
    assert not Path(position_file_path(lake.root)).exists()


def test_rows_that_name_a_version_whose_files_are_lost_go_although_later_versions_did_without(
    lake: HandLake, table: HandTable
) -> None:
    lost = file_of(table, 3)
    table.commit(whole=lost.name)
    lake.publish(0x1400, A)
    emptied(lost)
    assert mended(lake) == {}
    newest = read_epoch(lake.root)
    assert newest is not None
    assert (newest.epoch, newest.tables[A].version) == (2, 2)
    assert entries_of(storage.names(log_path(str(table.folder)))) == [0, 1, 2]


def test_what_is_not_whole_at_the_durable_version_is_damage_and_stays(lake: HandLake, table: HandTable) -> None:
    emptied(entry(table, 2))
    assert list(mended(lake)) == [A]
    assert entries_of(storage.names(log_path(str(table.folder)))) == [0, 1, 2, 3, 4]
    newest = read_epoch(lake.root)
    assert newest is not None
    assert newest.epoch == 3


@pytest.mark.parametrize(("version", "left"), [(-1, 0x1400), (-3, 0x1200)])
def test_a_row_of_the_ledger_with_zeros_within_goes_with_those_above(lake: HandLake, version: int, left: int) -> None:
    lake.publish(0x1400, A)
    lake.publish(0x1500)
    folder = ledger_path(lake.root)
    row = entries_of(storage.names(log_path(folder)))[version]
    zeros_within(Path(files_of(folder, row)[-1]))
    assert mended(lake) == {}
    newest = read_epoch(lake.root)
    assert newest is not None
    assert newest.position.lsn == left


def test_a_record_of_the_registry_with_zeros_within_was_never_stored(lake: HandLake) -> None:
    lake.enter(A, "suspended", "one")
    folder = registry_path(lake.root)
    zeros_within(Path(files_of(folder, entries_of(storage.names(log_path(folder)))[-1])[-1]))
    recovery.mend_control_tables(lake.root)
    registry = Registry.open(lake.root, "shop")
    assert registry is not None
    assert registry.tables[A].state == "active"


def test_a_row_that_a_mount_does_not_give_back_for_a_moment_stays(
    lake: HandLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: str, **_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), place)

    with monkeypatch.context() as away:
        away.setattr(storage, "parquet_file", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            recovery.mend_control_tables(lake.root)
    with monkeypatch.context() as away:
        away.setattr(torn_logs, "_is_parquet", lambda file: refuse(file) if "ledger" in file else True)
        with pytest.raises(OSError, match="Input/output error"):
            recovery.mend(lake.root, "shop", (), 0x1300)
    newest = read_epoch(lake.root)
    assert newest is not None
    assert newest.epoch == 3


def test_a_checkpoint_of_the_ledger_with_zeros_within_is_none(lake: HandLake) -> None:
    folder = ledger_path(lake.root)
    version = write_checkpoint(folder)
    zeros_within(Path(log_path(folder, f"{version:020d}.checkpoint.parquet")))
    assert mended(lake) == {}
    newest = read_epoch(lake.root)
    assert newest is not None
    assert newest.epoch == 3


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_row_of_the_ledger_was_never_published(lake: HandLake, damage: Callable[[Path], None]) -> None:
    folder = ledger_path(lake.root)
    damage(Path(log_entry(folder, entries_of(storage.names(log_path(folder)))[-1])))
    assert mended(lake) == {}
    newest = read_epoch(lake.root)
    assert newest is not None
    assert newest.epoch == 2


def test_a_row_below_what_the_source_was_told_is_not_cut_back_to(lake: HandLake) -> None:
    folder = ledger_path(lake.root)
    emptied(Path(log_entry(folder, entries_of(storage.names(log_path(folder)))[-2])))
    with pytest.raises(DamagedLake):
        mended(lake)
    assert mended(lake, confirmed=0x1100) == {}
    newest = read_epoch(lake.root)
    assert newest is not None
    assert newest.epoch == 1


def test_in_the_first_second_of_a_lake_nothing_was_told_to_the_source(lake: HandLake) -> None:
    folder = ledger_path(lake.root)
    emptied(Path(log_entry(folder, 2)))
    with pytest.raises(DamagedLake):
        mended(lake, confirmed=0x1100)
    assert recovery.mend(lake.root, "shop", (), 0x1000, 0x1000) == {}
    assert read_epoch(lake.root) is None
    assert read_generation(lake.root, "shop") == 1


def lost_slot(lake: HandLake, monkeypatch: pytest.MonkeyPatch, system_id: str = "") -> Any:
    """A pipeline whose slot the source (of `system_id`, if not the lake's own) does not have any more."""
    known = lake.registry.pipeline
    assert known is not None
    there = ServerIdentity(system_id or known.system_id, 1, 170000, False)
    monkeypatch.setattr(recovery, "read_slot", lambda *_: None)
    monkeypatch.setattr(recovery, "identify", lambda _: there)
    return SimpleNamespace(lake_path=lambda: lake.root, name="shop", source=SimpleNamespace(slot=known.slot))


@pytest.mark.parametrize("other", ["slot", "source"])
def test_a_slip_of_the_pipeline_file_takes_nothing_of_the_ledger(
    lake: HandLake, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    pipeline = lost_slot(lake, monkeypatch, "another" if other == "source" else "")
    if other == "slot":
        pipeline.source.slot = "another"
    folder = ledger_path(lake.root)
    emptied(Path(files_of(folder, entries_of(storage.names(log_path(folder)))[-2])[0]))
    before = entries_of(storage.names(log_path(folder)))
    assert recovery.mend_lake(None, pipeline, lake.registry) is None  # type: ignore[arg-type]
    assert entries_of(storage.names(log_path(folder))) == before


@pytest.mark.parametrize("damage", [*DAMAGES, zeros_within])
@pytest.mark.parametrize("which", [0, -1])
def test_without_its_slot_a_lake_goes_on_from_what_is_whole_of_its_ledger(
    lake: HandLake, damage: Callable[[Path], None], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tables are compared then; whoever opens the ledger before that must find it whole."""
    folder, pipeline = ledger_path(lake.root), lost_slot(lake, monkeypatch)
    damage(Path(files_of(folder, entries_of(storage.names(log_path(folder)))[-2])[which]))
    assert recovery.mend_lake(None, pipeline, lake.registry) is None  # type: ignore[arg-type]
    assert Ledger(lake.root, "shop").newest == read_epoch(lake.root, 1)


@pytest.mark.parametrize("which", [0, -1])
def test_a_new_source_goes_on_from_what_is_whole_of_the_ledger(lake: HandLake, which: int) -> None:
    folder = ledger_path(lake.root)
    emptied(Path(files_of(folder, entries_of(storage.names(log_path(folder)))[-2])[which]))
    known, now = lake.registry.pipeline, ServerIdentity("8", 1, 170000, False)
    assert known is not None
    assert not new_source._is_adopted(lake.registry, known, now, lake.root)
    new_source._mend_tables(lake.root, lake.registry)
    published = new_source._published(Ledger(lake.root, "shop"), Position("8", 1, 0x10), 6)
    assert (published.epoch, published.generation) == (2, 7)
    assert published.tables[A].version == 1


def test_upkeep_leaves_a_hole_in_the_ledger_to_the_next_start(lake: HandLake) -> None:
    for lsn in range(0x1400, 0x1440):
        lake.publish(lsn)
    folder = ledger_path(lake.root)
    emptied(Path(log_entry(folder, entries_of(storage.names(log_path(folder)))[-2])))
    recovery.mend_control_tables(lake.root)
    with pytest.raises(TornEntry):
        keep_ledger(lake.root, Event())
    assert mended(lake) == {}
    newest = read_epoch(lake.root)
    assert newest is not None
    assert newest.position.lsn == 0x143D


def test_a_torn_record_of_the_registry_was_never_stored_and_one_below_is_damage(lake: HandLake) -> None:
    lake.enter(A, "suspended", "one")
    lake.enter(A, "suspended", "two")
    folder = registry_path(lake.root)
    top = entries_of(storage.names(log_path(folder)))[-1]
    emptied(Path(log_entry(folder, top)))
    recovery.mend_control_tables(lake.root)
    registry = Registry.open(lake.root, "shop")
    assert registry is not None
    assert registry.tables[A].reason == "one"
    emptied(Path(log_entry(folder, top - 2)))
    with pytest.raises(DamagedLake):
        recovery.mend_control_tables(lake.root)


def test_of_two_that_begin_a_damaged_lake_anew_the_second_leaves_what_the_first_has_begun(lake: HandLake) -> None:
    lake.enter(A, "suspended", "one")
    emptied(Path(log_entry(registry_path(lake.root), 0)))
    with drivers.not_mended(lake.root):
        assert not recovery.begin_anew(lake.root, [])
    assert Path(log_path(registry_path(lake.root))).is_dir()
    assert recovery.begin_anew(lake.root, [])
    assert not Path(log_path(registry_path(lake.root))).exists()
    Registry.create(lake.root, "shop")
    assert recovery.begin_anew(lake.root, [])
    assert Registry.open(lake.root, "shop") is not None


def validate(lake: HandLake, epoch: int) -> None:
    result = TableResult(A, 1, epoch, 3, [SuiteResult("suite", 1, 0, 0, None)])
    moment = (utc(epoch), utc(epoch), utc(epoch + 60))
    validations.record(lake.root, Validation(str(epoch), "shop", epoch, lake.position, None, [result], *moment, "1"))


def test_what_was_validated_is_on_disk_when_that_is_said(lake: HandLake, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = set[str]()
    monkeypatch.setattr(storage, "sync_files", lambda *files: synced.update(files))
    validate(lake, 1)
    assert synced >= set(files_of(validations_path(lake.root), 1))


@pytest.mark.parametrize("lost", [0, 2])
def test_validations_that_are_damaged_go_and_refuse_no_job(lake: HandLake, lost: int) -> None:
    for epoch in (1, 2, 3):
        validate(lake, epoch)
    folder = validations_path(lake.root)
    emptied(Path(files_of(folder, lost)[-1]))
    recovery.mend_control_tables(lake.root)
    known = validations.earlier(lake.root, A)
    assert (known.epoch if known is not None else 0) == max(lost - 1, 0)
    validate(lake, 4)
    recovery.mend_control_tables(lake.root)
    known = validations.earlier(lake.root, A)
    assert known is not None
    assert known.epoch == 4


def test_a_torn_pin_was_promised_to_nobody(lake: HandLake) -> None:
    Path(pins_path(lake.root)).mkdir()
    torn = Path(pins_path(lake.root)) / "0.json"
    torn.write_bytes(b"")
    mended(lake)
    assert not torn.exists()


def test_a_load_can_write_whatever_the_log_holds(table: HandTable) -> None:
    root, folder = str(table.folder.parents[1]), str(table.folder)
    Path(root, "_headwater").mkdir()
    emptied(entry(table, 4))
    recovery.cure(root, folder)
    assert read_snapshot(folder).version == 3
    emptied(entry(table, 2))
    recovery.cure(root, folder)
    assert read_snapshot(folder).version == 1, "what lies below the damage can still be read"
    zeros(entry(table, 0))
    recovery.cure(root, folder)
    assert not table.folder.exists()
    assert (Path(root) / "_headwater" / "damaged" / "public" / "a" / "_delta_log").is_dir()
    with pytest.raises((DeltaError, FileNotFoundError)):
        read_snapshot(folder)


def test_a_load_can_write_where_the_checkpoint_is_damaged_and_nothing_is_left_below(
    table: HandTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = str(table.folder.parents[1]), str(table.folder)
    Path(root, "_headwater").mkdir()
    table.checkpoint()
    for version in range(4):
        entry(table, version).unlink()
    zeros_within(table.folder / "_delta_log" / f"{4:020d}.checkpoint.parquet")
    assert torn_logs.is_damaged(folder)
    recovery.cure(root, folder)
    assert not table.folder.exists()


def test_who_has_followed_rows_that_a_power_cut_took_mixes_them_with_no_others(lake: HandLake) -> None:
    followed = FollowedLedger(lake.root)
    seen = followed.epoch(3)
    assert seen is not None
    recent = RecentEpochs(lake.root)
    recent.refresh()
    torn_logs.cut_back(ledger_path(lake.root), entries_of(storage.names(log_path(ledger_path(lake.root))))[-1])
    lake.ledger = Ledger(lake.root, "shop")
    lake.ledger.begin_generation(lake.position.at(0x1200))
    lake.versions[A] = replace(lake.versions[A], version=2, applied_lsn=0x1200)
    lake.publish(0x1280)
    lake.publish(0x1400)
    newest = read_epoch(lake.root)
    assert newest is not None
    assert newest.epoch == 4
    assert newest.tables[A].version == 2
    assert followed.epoch(4) in (None, newest)
    assert FollowedLedger(lake.root).epoch(4) == newest
    recent.refresh()
    assert [(epoch.epoch, epoch.to_lsn) for epoch in recent.epochs][-2:] == [(3, 0x1280), (4, 0x1400)]
    assert recent.versions[A].version == 2
