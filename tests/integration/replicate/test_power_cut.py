"""After a power cut of the lake's host the next start goes on by itself: nothing is lost, nothing is there twice.

The source is another machine and lives on. A seed decides what runs, on which file system, how much of it the disk has
got, and when the power goes. HEADWATER_SEED replays a seed (up to the timing of the machine); HEADWATER_SOAK=1 draws
many (`make soak`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headwater
from fixtures.bank import Seen
from fixtures.great_bank import (
    BULK,
    OPTIONS,
    TABLES,
    assert_great_epoch_consistent,
    assert_history_consistent,
    create_great_bank,
    writing,
    writing_bulk,
)
from fixtures.jobs import Job, assert_equal, catch_up, following, load_tables, states_of
from fixtures.lake_waits import wait
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Connection, Database, new_database
from fixtures.power_cut import FILE_SYSTEMS, SYNC, FileSystem, LakeDisk, lake_disk, summary
from fixtures.soak import SOAK
from fixtures.staged import staged_files
from fixtures.waiting import until
from headwater.delta.delta_log import read_snapshot
from headwater.delta.whole import is_whole
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import Refused
from headwater.lake.cuts import Cut, list_pins, table_of
from headwater.lake.ledger import Epoch, read_all
from headwater.lake.paths import damaged_path
from headwater.lake.position_file import read_position_file
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("power_cuts")


# The harness itself: it must lose what was not synced, and nothing else.


@pytest.mark.skipif(SYNC, reason="HEADWATER_CUT_SYNC=1: these cuts lose nothing")
@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_a_cut_loses_what_was_not_synced_and_keeps_what_was(file_system: FileSystem) -> None:
    with lake_disk(file_system) as disk:
        (disk.path / "before").write_text("of the day before")
        disk.sync()
        (disk.path / "named").write_text("without a sync")
        _write_synced(disk.path / "synced", b"with a sync of file and folder")
        (disk.path / "nothing").write_text("without a sync, and nobody has synced since")
        disk.cut()
        assert (disk.path / "before").read_text() == "of the day before"
        assert (disk.path / "synced").read_bytes() == b"with a sync of file and folder"
        # The sync of the other file has brought its name to the disk, and not its data.
        assert (disk.path / "named").read_bytes() == b""
        assert not (disk.path / "nothing").exists()


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_a_cut_takes_whole_process_groups_and_nothing_reaches_the_disk_afterwards(file_system: FileSystem) -> None:
    program = (
        "import os, sys\n"
        "number, child = 0, os.fork()\n"
        "while True:\n"
        "    number += 1\n"
        "    with open(f'{sys.argv[1]}/{child == 0}', 'w') as file:\n"
        "        file.write(str(number)); file.flush(); os.fsync(file.fileno())\n"
    )
    with lake_disk(file_system) as disk:

        def number(name: str) -> int:
            path = disk.path / name
            return int(path.read_text() or 0) if path.exists() else 0

        job = subprocess.Popen([sys.executable, "-c", program, str(disk.path)], start_new_session=True)
        # A second number says that the first sync is through: before, the disk need not know the file's name.
        until(lambda: all(number(name) > 1 for name in ("True", "False")), "parent and child write")
        disk.cut(job)
        assert job.returncode is not None
        assert not _members(job.pid)
        found = [(disk.path / name).read_text() for name in ("True", "False")]
        disk.cut()
        assert [(disk.path / name).read_text() for name in ("True", "False")] == found


def test_a_disk_leaves_nothing_behind_when_its_test_fails() -> None:
    folders = []

    def fail() -> None:
        with lake_disk("ext4") as disk:
            folders.append(disk.path.parent)
            assert _devices(folders[0])
            disk.disturb(1, 0.001)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not folders[0].exists()
    assert not _devices(folders[0])
    assert str(folders[0]) not in Path("/proc/self/mounts").read_text()


def _write_synced(path: Path, data: bytes) -> None:
    for place, flags in ((path, os.O_WRONLY | os.O_CREAT), (path.parent, os.O_RDONLY)):
        descriptor = os.open(place, flags)
        try:
            if place == path:
                os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _members(session: int) -> list[int]:
    """The processes of a session that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == session and (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def _devices(folder: Path) -> list[str]:
    """Images below `folder` that loop devices hold. Those of others come and go meanwhile."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if (image := path.read_text()).startswith(f"{folder}/"):
                found.append(image)
    return found


# The product. A seed decides what runs, on which file system, and when the power goes.

_LARGE = "large transactions"
"""Replicate alone, and beside the usual load one of transactions that are staged while they are open."""
_JOBS = (
    *("replicate", "reload beside", "replicate", "load again beside", "replicate", "rebuild beside", _LARGE),
    *("maintain beside", "replicate", "first load", "replicate", "upkeep", "reload", "replicate", "load again beside"),
    *("replicate", "rebuild", "maintain", "upkeep", "load of a new table"),
)
_EACH_JOB_ONCE = sorted({job: seed for seed, job in reversed([*enumerate(_JOBS)])}.values())
_TURNS = range(int(os.environ.get("HEADWATER_SOAK_SEEDS", "200"))) if SOAK else _EACH_JOB_ONCE
_SEEDS_OF_A_LIFE = 40
_CHECKED_EPOCHS = 40
"""So many of a seed's epochs are read: the newest and some before."""


@dataclass(frozen=True)
class Moment:
    """When the power goes: `seconds` after the job has begun to work, then, if `at_epoch`, when an epoch appears. Of
    large transactions: after rows are staged, then, if `at_epoch`, when rows are linked into their table."""

    seconds: float
    at_epoch: bool


@dataclass(frozen=True)
class Plan:
    seed: int
    job: str
    file_system: FileSystem
    moments: tuple[Moment, ...]
    syncs_every: float
    """Seconds between two doings of the neighbours on the disk; 0: there are none."""
    data: float
    """How much of the files' data they have the kernel write."""
    max_seconds: float
    keep_cuts: str
    pace: float
    large: float

    @classmethod
    def of(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        job = _JOBS[seed % len(_JOBS)]
        longest = 4.0 if job in ("upkeep", _LARGE) else 2.5 if "load" in job or "rebuild" in job else 1.5
        count = 2 if chance.random() < 0.3 else 1
        return cls(
            seed,
            job,
            chance.choice(FILE_SYSTEMS),
            tuple(Moment(chance.uniform(0.1, longest), chance.random() < 0.5) for _ in range(count)),
            chance.choice((0.0, 0.02, 0.1, 0.1, 0.4)),
            chance.choice((0.0, 0.1, 0.5)),
            chance.choice((0.05, 0.3, 1.0)),
            "1s" if job in ("upkeep", "maintain", "maintain beside") else "1h",
            chance.choice((0.005, 0.02, 0.05)),
            chance.choice((0.0, 0.02, 0.1)),
        )


@dataclass
class Ground:
    """A source, and a lake of it that is whole: each seed works on a copy, which is kept when it was right."""

    folder: Path
    database: Database
    kept: Path
    options: dict[str, dict[str, Any]] = field(default_factory=lambda: dict(OPTIONS))
    extra: list[str] = field(default_factory=list)

    @property
    def slot(self) -> str:
        return f"slot_{self.database.name}"

    @property
    def tables(self) -> list[str]:
        return [*TABLES, *self.extra]

    def pipeline(self, root: Path, **sections: Any) -> Pipeline:
        entries = [{"name": name, **self.options.get(name, {})} for name in self.tables]
        return write_pipeline(self.folder, self.database, *entries, lake={"root": root.as_uri()}, **sections)

    def lay(self, root: Path) -> None:
        """The kept lake at `root`, and the slot where that lake needs it."""
        subprocess.run(["cp", "-a", str(self.kept), str(root)], check=True)
        self._copy_slot(self._kept_slot, self.slot)

    def keep(self, root: Path) -> None:
        shutil.rmtree(self.kept, ignore_errors=True)
        subprocess.run(["cp", "-a", str(root), str(self.kept)], check=True)
        self._copy_slot(self.slot, self._kept_slot)

    @property
    def _kept_slot(self) -> str:
        return f"{self.slot}_kept"

    def _copy_slot(self, source: str, target: str) -> None:
        lose_connections(self.database)
        with self.database.superuser() as connection:
            connection.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s", (target,)
            )
            connection.execute("select pg_copy_logical_replication_slot(%s, %s)", (source, target))


def lose_connections(database: Database) -> None:
    """The server notices that the other machine is gone: what `wal_sender_timeout` and keepalives do."""
    with database.superuser() as connection:
        connection.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity where usename = %s", (database.role,)
        )
        until(lambda: not _is_known(connection, database), "the source has lost the lake's host")


def _is_known(connection: Connection, database: Database) -> bool:
    row = connection.execute("select count(*) from pg_stat_activity where usename = %s", (database.role,)).fetchone()
    return row != (0,)


@pytest.fixture(scope="module")
def grounds(
    postgres: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Iterator[Ground]]:
    """The ground of the next seed. After so many it is another one: history makes every seed dearer."""
    found = _each_life(postgres, tmp_path_factory)
    yield found
    found.close()


def _each_life(postgres: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Generator[Ground]:
    while True:
        with _new_ground(postgres, tmp_path_factory.mktemp("ground")) as made:
            for _ in range(_SEEDS_OF_A_LIFE):
                yield made


@contextlib.contextmanager
def _new_ground(postgres: EmbeddedServer, folder: Path) -> Iterator[Ground]:
    with new_database(postgres) as database:
        create_great_bank(database)
        database.allow_publishing()
        made = Ground(folder, database, folder / "kept")
        pipeline = made.pipeline(folder / "lake", replicate={"max_seconds": 0.05})
        load_tables(pipeline)
        # Logs long enough that a checkpoint is near, and many small files.
        with following(pipeline) as driver, writing(database, seed=0, pace=0.02):
            until(lambda: driver.done() or newest_epoch(pipeline) > 80, "the lake has some history")
        catch_up(pipeline)
        made.keep(folder / "lake")
        shutil.rmtree(folder / "lake")
        yield made


def newest_epoch(pipeline: Pipeline) -> int:
    """By the file that pollers read; 0 where a cut has left none that can be read."""
    with contextlib.suppress(ValueError, KeyError):
        file = read_position_file(pipeline.lake_path())
        return file.epoch if file is not None else 0
    return 0


@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.parametrize("turn", _TURNS if "HEADWATER_SEED" not in os.environ else [0])
def test_after_a_cut_the_next_start_goes_on_by_itself(
    turn: int, grounds: Iterator[Ground], spark: SparkSession, tmp_path: Path
) -> None:
    drawn = random.SystemRandom().randrange(1 << 31) if SOAK else turn
    plan = Plan.of(int(os.environ.get("HEADWATER_SEED", drawn)))
    print(f"\nHEADWATER_SEED={plan.seed} {plan}")
    with lake_disk(plan.file_system) as disk:
        host = Host(plan, next(grounds), spark, disk, tmp_path)
        try:
            host.run()
        except BaseException as error:
            error.add_note(f"HEADWATER_SEED={plan.seed} replays {plan}\n{host.story}")
            raise


class Host:
    """The lake's host during one seed."""

    def __init__(self, plan: Plan, ground: Ground, spark: SparkSession, disk: LakeDisk, folder: Path) -> None:
        self.plan, self.ground, self.spark, self.disk, self.folder = plan, ground, spark, disk, folder
        self.root = disk.path / "lake"
        self.chance = random.Random(plan.seed + 1)
        self.told: list[str] = []
        self.handed_out: list[tuple[Cut, dict[str, int]]] = []
        self.recovered = False

    @property
    def story(self) -> str:
        return "\n".join(self.told)

    def run(self) -> None:
        if self.plan.job == "first load":
            self._first_load()
        else:
            self._on_kept_ground()

    def _on_kept_ground(self) -> None:
        ground, plan = self.ground, self.plan
        options, extra = dict(ground.options), list(ground.extra)
        try:
            ground.lay(self.root)
            self.pipeline = self._pipeline()
            self.before = newest_epoch(self.pipeline)
            command = self._command()
            self.disk.sync()
            with ExitStack() as load:
                load.enter_context(writing(ground.database, plan.seed, plan.pace, plan.large))
                if plan.job == _LARGE:
                    load.enter_context(writing_bulk(ground.database, plan.seed))
                for moment in plan.moments:
                    self._cut(command, moment)
            self._goes_on(command)
            self._is_exact()
        except BaseException:
            ground.options, ground.extra = options, extra
            raise
        ground.keep(self.root)

    def _first_load(self) -> None:
        """Of a pipeline that the lake knows nothing of: registry, publications and slot are made."""
        plan = self.plan
        with new_database(self.ground.database.server) as database:
            create_great_bank(database)
            database.allow_publishing()
            self.ground = Ground(self.folder, database, self.folder / "kept")
            self.pipeline, self.before = self._pipeline(), 0
            self.disk.sync()
            with writing(database, plan.seed, plan.pace, plan.large):
                for moment in plan.moments:
                    self._cut(["load"], moment)
            for name, state in states_of(self._succeeds("load", or_else=4)).items():
                if state == "suspended":  # truncated faster than it could be read, before the cut: load said so
                    self._succeeds("load", "--table", name, "--again")
                    self._replicates()
            self._goes_on(None)
            self._is_exact()

    def _pipeline(self) -> Pipeline:
        keep, seconds = {"keep_cuts": self.plan.keep_cuts}, {"max_seconds": self.plan.max_seconds}
        entries = [{"name": name, **self.ground.options.get(name, {})} for name in self.ground.tables]
        root = {"root": self.root.as_uri()}
        return write_pipeline(self.folder, self.ground.database, *entries, lake={**root, **keep}, replicate=seconds)

    def _command(self) -> list[str] | None:
        """What the plan's job is in the shell; None: replicate alone."""
        job, chance, ground = self.plan.job.removesuffix(" beside"), self.chance, self.ground
        if job == "load again":
            named = chance.sample(("counters", "entries", "documents", "scratch", "events", "readings"), 2)
            return ["load", "--again", *(word for name in named for word in ("--table", name))]
        if job == "reload":
            what = chance.choice(
                (
                    ("readings", "--partition", "readings_eu"),
                    ("documents",),
                    ("readings", "--where", "id between 50 and 150"),
                )
            )
            return ["reload", "--table", *what]
        if job == "rebuild":
            name = chance.choice(("public.readings", "public.documents"))
            column = "region" if name == "public.readings" else "edits"
            now = ground.options.get(name, {})
            ground.options[name] = {} if now else {"partition_by": [column]}
            self.pipeline = self._pipeline()
            return ["rebuild", "--table", name]
        if job == "load of a new table":
            name = f"public.new_{len(ground.extra)}"
            ground.database.execute(
                f"create table {name} (id int primary key, note text)",
                f"insert into {name} select i, repeat('n', 500) || i from generate_series(1, 2000) i",
            )
            ground.extra.append(name)
            self.pipeline = self._pipeline()
            return ["load"]
        return ["maintain"] if job == "maintain" else None

    def _cut(self, command: list[str] | None, moment: Moment) -> None:
        """Start what is to run, and take the power at that moment."""
        plan = self.plan
        began = time.monotonic()
        with ExitStack() as running:
            jobs = []
            if command is None or plan.job.endswith(" beside"):
                driver = running.enter_context(Job(self.pipeline, "replicate"))
                jobs.append(driver)
                if self.disk.cuts == 0:
                    self._publishes(driver, newest_epoch(self.pipeline), 120)
            if plan.syncs_every:
                self.disk.disturb(plan.seed, plan.syncs_every, plan.data)
            if command is not None:
                jobs.append(running.enter_context(Job(self.pipeline, *command, spark=self.spark)))
            if plan.job == _LARGE:
                self._stages(driver)
            due = time.monotonic() + moment.seconds
            while time.monotonic() < due:
                time.sleep(min(0.1, max(0.0, due - time.monotonic())))
                if command is None or plan.job.endswith(" beside"):
                    self._take_cut()
            if moment.at_epoch and plan.job == _LARGE:
                self._links(driver)
            elif moment.at_epoch and (command is None or plan.job.endswith(" beside")):
                self._publishes(driver, newest_epoch(self.pipeline), 3, or_fail=False)
            status = [job.process.poll() for job in jobs]
            took = self.disk.cut(*(job.process for job in jobs), spark=self.spark if command is not None else None)
            self.told.append(
                f"cut {self.disk.cuts} after {time.monotonic() - began:.2f} s (copied in {took * 1000:.0f} ms), "
                f"jobs by then: {status}; logs: {[job.log[-1500:] for job in jobs if job.log]}; lost: "
                + summary(self.disk.losses)
            )
        lose_connections(self.ground.database)
        self._take_cut()

    def _publishes(self, driver: Job, before: int, seconds: float, *, or_fail: bool = True) -> None:
        """Until the driver publishes another epoch than `before`, or ends. Asked for as fast as that may be: the
        moment behind an epoch is the one that hurts."""
        deadline = time.monotonic() + seconds
        while newest_epoch(self.pipeline) == before and driver.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not or_fail or newest_epoch(self.pipeline) != before, f"nothing is published: {driver.log[-3000:]}"

    def _stages(self, driver: Job) -> None:
        until(lambda: staged_files(str(self.root)) or driver.process.poll() is not None, "rows are staged", 120)
        assert driver.process.poll() is None, driver.log[-3000:]
        self.told.append("rows are staged")

    def _links(self, driver: Job) -> None:
        """Until staged rows have names in their table, as the first step of a commit; asked for as fast as that may be.
        A transaction that is rolled back has none."""
        deadline, table = time.monotonic() + 10, self.root / TableName.parse(BULK).path
        before = set(os.listdir(table))
        while time.monotonic() < deadline and driver.process.poll() is None:
            if any(name.endswith(".parquet") for name in set(os.listdir(table)) - before):
                self.told.append("rows were linked")
                return
            time.sleep(0.0005)

    def _take_cut(self) -> None:
        """A reader on another machine is given the newest cut, which is pinned. Between a cut of the power and the next
        epoch it may fail."""
        try:
            cut = wait(self.pipeline, None, "1h", 0).cut
            if cut is not None and cut["tables"]["public.counters"]["state"] == "in step":
                self.handed_out.append((cut, _counters(cut)))
        except Exception as error:
            if not self.disk.cuts or self.recovered:
                raise
            self.told.append(f"a wait failed after cut {self.disk.cuts}: {error}")

    def _goes_on(self, command: list[str] | None) -> None:
        self._replicates()
        if command is not None:
            self._succeeds(*command)
            self._replicates()

    def _replicates(self) -> None:
        result = self._succeeds("replicate", "--until", "now")
        states = states_of(result)
        assert self.plan.job.startswith(("load", "reload")) or set(states.values()) == {"active"}, states

    def _succeeds(self, command: str, *arguments: str, or_else: int = 0) -> dict[str, Any]:
        spark = self.spark if command in ("load", "reload", "rebuild") else None
        began = time.monotonic()
        with Job(self.pipeline, command, *arguments, spark=spark) as job:
            status = job.wait(240)
            self.told.append(f"{command} ended with {status} after {time.monotonic() - began:.2f} s")
            said = job._out.read_text()[-3000:]
            assert status in (0, or_else), (
                f"`headwater {command} {' '.join(arguments)}` ended with {status}: {said}\n{job.log[-3000:]}"
            )
            return job.result

    def _is_exact(self) -> None:
        """Every row, every cut that the ledger has, and every one that a reader was given."""
        pipeline = self.pipeline
        assert_equal(self.ground.database, pipeline, *self.ground.tables)
        epochs = [epoch for epoch in read_all(pipeline.lake_path()) if epoch.epoch > self.before]
        for one, next_one in pairwise(epochs):
            assert next_one.epoch == one.epoch + 1
            assert next_one.from_lsn == one.position.lsn
        assert {version.state for version in epochs[-1].tables.values()} == {"active"}
        seen: Seen = {}
        for epoch in self._some(epochs):
            if epoch is epochs[-1] or self._is_kept(epoch):
                assert_great_epoch_consistent(pipeline, epoch, seen)
        assert_history_consistent(pipeline, epochs[-1])
        list_pins(pipeline.lake_path())
        assert_logs_whole(self.root)
        self.recovered = True
        handed_out = len(self.handed_out)
        self._take_cut()
        assert len(self.handed_out) > handed_out, "a wait is not satisfied"
        for cut in self.handed_out[-5:]:
            self._is_right_or_gone(*cut)

    def _some(self, epochs: list[Epoch]) -> list[Epoch]:
        spare = max(0, len(epochs) - _CHECKED_EPOCHS)
        return self.chance.sample(epochs[:spare], min(spare, 10)) + epochs[spare:]

    def _is_kept(self, epoch: Epoch) -> bool:
        """Whether clean-up has left all files of it: it must for an hour, and may take them earlier where the plan says
        so."""
        root = self.pipeline.lake_path()
        paths = {name: TableName.parse(table_of(name)).path for name in epoch.tables}
        whole = all(
            is_whole(f"{root}/{paths[name]}", v.version) for name, v in epoch.tables.items() if name == table_of(name)
        )
        assert whole or self.plan.keep_cuts != "1h", f"epoch {epoch.epoch} is in the ledger, and its files are gone"
        return whole

    def _is_right_or_gone(self, cut: Cut, then: dict[str, int]) -> None:
        """It is what it was, or refused by name: never another content under the same number."""
        names = [name for name in ("entries", "events", "readings") if _is_in_step(cut, name)]
        try:
            counters, found = _counters(cut), {name: headwater.scan(cut, f"public.{name}").read_all() for name in names}
        except Refused as refused:
            if refused.code != "cut_gone":
                raise
            return
        where = f"a cut that was handed out before the power went is another one now: {cut}"
        assert counters == then, where
        for name, rows in found.items():
            assert counters[name] == (sum(rows["n"].to_pylist()) if name == "readings" else rows.num_rows), where


def _is_in_step(cut: Cut, name: str) -> bool:
    return bool(cut["tables"][f"public.{name}"]["state"] == "in step")


def _counters(cut: Cut) -> dict[str, int]:
    rows = headwater.scan(cut, "public.counters").read_all()
    return dict(zip(rows["name"].to_pylist(), rows["value"].to_pylist(), strict=True))


def assert_logs_whole(root: Path) -> None:
    """Every entry of every Delta log is whole, as any reader needs it, and every file of the newest versions is; what
    was set aside is not asked about."""
    logs = (log for log in root.rglob("_delta_log") if not log.is_relative_to(damaged_path(str(root), "")))
    for log in logs:
        for entry in log.glob("*.json"):
            text = entry.read_text()
            assert text.strip(), f"{entry} is empty"
            for line in text.splitlines():
                json.loads(line)
        table = log.parent
        for file in read_snapshot(str(table)).files.values():
            assert (table / file.name).stat().st_size == file.size, (
                f"{table / file.name} is not as long as its log says"
            )
