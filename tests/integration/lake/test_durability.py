"""What is durable when: the source forgets nothing that a power cut could take, and damage is one table's trouble.

Real cuts are in test_power_cut; here the order of the calls is held, which needs neither root nor a disk of its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.bank import TABLES, Bank, assert_cuts_consistent, replicated_bank
from fixtures.jobs import Job, assert_equal, catch_up, following, load_tables, states_of, until
from headwater.delta import storage
from headwater.delta.log_entries import entries_of, log_entry, log_path
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import DamagedLake, Transient
from headwater.lake.ledger import read_epoch
from headwater.lake.paths import ledger_path, registry_path, table_path
from headwater.lake.position_file import read_position_file
from headwater.lake.registry import Registry
from headwater.load.load import load
from headwater.monitor.status import status
from headwater.position import parse_lsn
from headwater.source.connection import connect
from headwater.source.slot import read_slot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture
def bank(postgres: EmbeddedServer, spark: SparkSession, tmp_path: Path) -> Iterator[Bank]:
    with replicated_bank(postgres, tmp_path, seed=31) as made:
        yield made


def confirmed(bank: Bank) -> int:
    with connect(bank.pipeline.conninfo()) as connection:
        slot = read_slot(connection, bank.pipeline.source.slot)
    assert slot is not None
    assert slot.confirmed_lsn is not None
    return slot.confirmed_lsn


def published(bank: Bank) -> int:
    epoch = read_epoch(bank.pipeline.lake_path())
    assert epoch is not None
    return epoch.position.lsn


class Disk:
    """Stands at the door: syncs that end when they are let, and what the ledger held when each began."""

    def __init__(self, bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bank, self.free = bank, threading.Event()
        self.free.set()
        self.covered = 0
        self.waiting = 0
        real = storage.sync

        def sync(root: str) -> None:
            reached = published(bank)
            self.waiting += 1
            self.free.wait(60)
            real(root)
            self.covered = max(self.covered, reached)

        monkeypatch.setattr(storage, "sync", sync)


def test_the_slot_is_told_what_a_completed_sync_covers_and_readers_do_not_wait_for_it(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(bank, monkeypatch)
    begin = published(bank)
    with following(bank.pipeline):
        bank.writer.write(3)
        # Of its own: one syncs what earlier ones have left before it begins.
        until(lambda: confirmed(bank) > begin and disk.covered > begin, "it has synced")
        disk.free.clear()
        bank.writer.write(3)
        until(lambda: disk.waiting > 1 and published(bank) > disk.covered, "a sync is under way")
        before = bank.epoch
        for number in range(1, 4):
            bank.writer.write(3)
            until(lambda at=before + number: bank.epoch >= at, "epochs go on beside it")  # type: ignore[misc]
            assert confirmed(bank) <= disk.covered < published(bank)
        position = published(bank)
        shown = status(bank.pipeline)
        assert parse_lsn(shown["durable_position"]["lsn"]) <= disk.covered < parse_lsn(shown["position"]["lsn"])
        disk.free.set()
        until(lambda: confirmed(bank) >= position, "what is durable by now is confirmed")
        assert confirmed(bank) <= disk.covered
    file = read_position_file(bank.pipeline.lake_path())
    assert file is not None
    assert file.durable_position == file.position, "a clean stop waits for the disk"
    assert confirmed(bank) == published(bank)
    bank.assert_exact()


def test_a_disk_that_says_no_ends_the_driver_and_nothing_is_confirmed(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = confirmed(bank)
    bank.writer.write(3)

    def sync(root: str) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(storage, "sync", sync)
        with pytest.raises(Transient, match="Input/output error") as failed:
            catch_up(bank.pipeline)
    assert failed.value.code == "lake_unavailable"
    assert confirmed(bank) == before
    catch_up(bank.pipeline)
    bank.assert_exact()


def folder_of(bank: Bank, table: str) -> str:
    return table_path(bank.pipeline.lake_path(), table.replace(".", "/"))


def entries(folder: str) -> list[int]:
    return entries_of(storage.names(log_path(folder)))


def test_a_damaged_entry_below_whole_ones_suspends_its_table_and_loading_it_again_cures_it(bank: Bank) -> None:
    folder = folder_of(bank, "public.keyed")
    while len(entries(folder)) < 4:
        bank.writer.write(5)
        catch_up(bank.pipeline)
    damaged = Path(log_entry(folder, entries(folder)[-2]))
    damaged.write_bytes(b"")
    bank.writer.write(10)
    states = states_of(catch_up(bank.pipeline))
    assert {name for name, state in states.items() if state != "active"} == {"public.keyed"}
    shown = status(bank.pipeline)["tables"]["public.keyed"]
    assert damaged.name in shown["reason"]
    assert "--table public.keyed --again" in shown["remedy"]
    assert_equal(bank.database, bank.pipeline, *(name for name in TABLES if name != "public.keyed"))
    load_tables(bank.pipeline, "public.keyed", again=True)
    catch_up(bank.pipeline)
    before = bank.epoch
    bank.writer.write(5)
    states = states_of(catch_up(bank.pipeline))
    assert set(states.values()) == {"active"}, status(bank.pipeline)["tables"]["public.keyed"]
    assert_equal(bank.database, bank.pipeline, *TABLES)
    assert_cuts_consistent(bank.pipeline, before)


def test_a_data_file_of_another_size_suspends_its_table_by_name(bank: Bank) -> None:
    folder = Path(folder_of(bank, "public.documents"))
    for file in folder.glob("*.parquet"):
        file.write_bytes(file.read_bytes()[:100])
    bank.database.execute("update documents set edits = edits + 1")
    states = states_of(catch_up(bank.pipeline))
    assert {name for name, state in states.items() if state != "active"} == {"public.documents"}
    assert "has 100 bytes, and the log says" in status(bank.pipeline)["tables"]["public.documents"]["reason"]
    load_tables(bank.pipeline, "public.documents", again=True)
    assert set(states_of(catch_up(bank.pipeline)).values()) == {"active"}
    assert_equal(bank.database, bank.pipeline, *TABLES)


@pytest.mark.parametrize("which", [registry_path, ledger_path])
@pytest.mark.parametrize("how", ["entry", "file"])
def test_a_lake_whose_control_tables_are_damaged_is_refused_by_name_and_loading_all_again_cures_it(
    bank: Bank, which: object, how: str
) -> None:
    assert callable(which)
    root = bank.pipeline.lake_path()
    folder = which(root)
    bank.writer.write(3)
    catch_up(bank.pipeline)
    version = entries(folder)[-3]
    damaged = Path(log_entry(folder, version))
    if how == "file":
        adds = [json.loads(line) for line in damaged.read_text().splitlines() if line.startswith('{"add"')]
        damaged = Path(folder) / adds[0]["add"]["path"]
    damaged.write_bytes(b"")
    with Job(bank.pipeline, "replicate", "--until", "now") as job:
        assert job.wait(60) == 2, job.log
        assert job.result["error"]["code"] == "damaged_lake"
        assert damaged.name in job.result["error"]["message"]
    with pytest.raises(DamagedLake):
        load(bank.pipeline, [])
    bank.writer.write(3)
    load(bank.pipeline, [], again=True)
    assert set(states_of(catch_up(bank.pipeline)).values()) == {"active"}
    assert_equal(bank.database, bank.pipeline, *TABLES)
    registry = Registry.open(root, bank.pipeline.name)
    assert registry is not None
    bank.writer.write(3)
    catch_up(bank.pipeline)
    assert_equal(bank.database, bank.pipeline, *TABLES)


def test_a_damaged_table_is_loaded_again_beside_a_driver(bank: Bank) -> None:
    folder = folder_of(bank, "public.keyed")
    while len(entries(folder)) < 5:
        bank.writer.write(5)
        catch_up(bank.pipeline)
    Path(log_entry(folder, entries(folder)[-2])).write_bytes(b"")
    with following(bank.pipeline):
        bank.writer.write(10)
        until(lambda: status(bank.pipeline)["tables"]["public.keyed"]["state"] == "suspended", "it is suspended")
        load_tables(bank.pipeline, "public.keyed", again=True)
        until(lambda: status(bank.pipeline)["tables"]["public.keyed"]["state"] == "active", "it is in step")
        newest = read_epoch(bank.pipeline.lake_path())
        assert newest is not None
        assert newest.tables["public.keyed"].version <= entries(folder)[-1]
        bank.writer.write(5)
    assert set(states_of(catch_up(bank.pipeline)).values()) == {"active"}
    assert_equal(bank.database, bank.pipeline, *TABLES)
    bank.writer.write(5)
    catch_up(bank.pipeline)
    assert_equal(bank.database, bank.pipeline, *TABLES)
