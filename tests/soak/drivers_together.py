"""Loads, reloads, maintenance, repairs and drivers on one pipeline, all started together, and some of them killed.

`python tests/soak/drivers_together.py --rounds 100 --seed N`: each round draws its own seed from N's and prints it with
what became of every job; `--only SEED` is that round alone. The first round that fails ends the program. After each
round no lease had two holders, no table took a commit of a driver behind one of its successor's, every cut is a state
that the source had, and the lake equals the source. A round in which nothing but maintenance succeeded does not count.
In half of the rounds the driver that takes over starts when the other one reads the log, not together with it.

All rounds share a source and a lake, so what a round leaves behind is the next one's matter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltalake import DeltaTable

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures.bank import TABLES, Bank, assert_cuts_consistent, replicated_bank, writing
from fixtures.jobs import Job, assert_equal, catch_up, load_tables, registry_of, states_of, until
from fixtures.postgres import Database
from headwater.delta.delta_log import read_snapshot
from headwater.delta.small_tables import SmallTable, read_rows
from headwater.delta.tables import commits_after
from headwater.demo.postgres import EmbeddedServer
from headwater.lake.history import history_record
from headwater.lake.ledger import generation_app
from headwater.lake.paths import registry_path, table_path
from headwater.pipeline_file.pipeline import Pipeline
from headwater.spark.session import SHORT_LIVED_JVM, build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RELOADED: Final = [name for name in TABLES if name != "public.keyed"]  # a table with a history is not reloaded
KILLED_SHARE: Final = 0.4
START_SECONDS: Final = 2.0
DRIVER_SECONDS: Final = 30
END_SECONDS: Final = 240.0
MOST_IDLE: Final = 3
DONE: Final = "0"


@dataclass
class Rounds:
    """Rounds on one bank; `run` plays one and raises what it finds."""

    bank: Bank
    spark: SparkSession
    driver_seconds: int = DRIVER_SECONDS
    checked_epoch: int = 0
    checked_versions: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each table's folder: so far its log was looked at, and the generation that it carries there."""

    def run(self, seed: int) -> tuple[str, bool]:
        """What became of each job, in words; whether any has succeeded."""
        drawn = random.Random(seed)
        with LeaseWatch(self.bank.database, self.bank.pipeline) as watch, contextlib.ExitStack() as running:
            with writing(self.bank.database, seed, pace=0.05):
                started = [(command, running.enter_context(job)) for command, job in self._start(drawn)]
                fates = [self._fate(drawn) for _ in started]
                self._let_them_work(started, fates)
            outcomes = [_outcome(job) for _, job in started]
            for _, job in started:
                until(lambda job=job: not job.left, "what a job had started has ended")  # type: ignore[misc]
        watch.refuse_two_holders()
        self._recover()
        self._refuse_late_commits()
        told = [f"{command[0]} {outcome}" for (command, _), outcome in zip(started, outcomes, strict=True)]
        done = {command[0] for (command, _), outcome in zip(started, outcomes, strict=True) if outcome == DONE}
        return ", ".join(told), bool(done - {"maintain"})

    def _start(self, drawn: random.Random) -> Iterator[tuple[tuple[str, ...], Job]]:
        driver = ("replicate", "--max-seconds", str(self.driver_seconds))
        successor = ("replicate", "--take-over", "--max-seconds", str(self.driver_seconds))
        waits = drawn.random() < 0.5
        commands = [
            driver,
            *([] if waits else [successor]),
            ("load", "--again", "--table", drawn.choice(TABLES)),
            ("reload", "--table", drawn.choice(RELOADED)),
            ("maintain",),
            ("verify", "--repair", "--table", drawn.choice(TABLES)),
        ]
        drawn.shuffle(commands)
        jobs = {}
        for command in commands:
            time.sleep(drawn.uniform(0, START_SECONDS / len(commands)))
            jobs[command] = Job(self.bank.pipeline, *command, spark=self.spark)
            yield command, jobs[command]
        if waits:

            def ready() -> bool:
                return self._is_read() or jobs[driver].process.poll() is not None

            until(ready, "a driver reads the log, or has ended", END_SECONDS)
            yield successor, Job(self.bank.pipeline, *successor, spark=self.spark)

    def _is_read(self) -> bool:
        slot = self.bank.pipeline.source.slot
        return bool(
            self.bank.database.query(f"select 1 from pg_replication_slots where slot_name = '{slot}' and active")
        )

    def _let_them_work(self, started: list[tuple[tuple[str, ...], Job]], fates: list[float | None]) -> None:
        """Until all have ended: of their own accord, or killed after so many seconds."""
        began = time.monotonic()

        def all_ended() -> bool:
            for (_, job), fate in zip(started, fates, strict=True):
                if fate is not None and time.monotonic() - began > fate and job.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(job.pid, signal.SIGKILL)
            return all(job.process.poll() is not None for _, job in started)

        until(all_ended, f"all jobs have ended: {[command[0] for command, _ in started]}", END_SECONDS)

    def _fate(self, drawn: random.Random) -> float | None:
        """After how many seconds a job is killed; None: it is not."""
        return drawn.uniform(0, self.driver_seconds * 2 / 3) if drawn.random() < KILLED_SHARE else None

    def _recover(self) -> None:
        """What the next run of each makes of it."""
        load_tables(self.bank.pipeline)
        for name, record in registry_of(self.bank.pipeline).tables.items():
            # One that is truncated about once a second may be truncated during each attempt to load it.
            if record.state == "suspended" and "attempts to load it failed" in record.reason:
                load_tables(self.bank.pipeline, name, again=True)
        states = states_of(catch_up(self.bank.pipeline))
        reasons = {name: record.reason for name, record in registry_of(self.bank.pipeline).tables.items()}
        assert set(states.values()) == {"active"}, reasons
        assert_equal(self.bank.database, self.bank.pipeline, *TABLES)
        self.checked_epoch = assert_cuts_consistent(self.bank.pipeline, self.checked_epoch)

    def _refuse_late_commits(self) -> None:
        """No commit carries an older generation than one before it: its driver had a successor by then."""
        app = generation_app(self.bank.pipeline.name)
        for record in registry_of(self.bank.pipeline).tables.values():
            for path in [record.path, *([history_record(record).path] if record.schema.history else [])]:
                folder = table_path(self.bank.pipeline.lake_path(), path)
                version, newest = self.checked_versions.get(folder, (-1, 0))
                for commit in commits_after(folder, version):
                    version, generation = commit.version, commit.transactions.get(app, newest)
                    assert generation >= newest, f"{folder}: version {version} of {generation} came behind {newest}"
                    newest = generation
                assert version == DeltaTable(folder).version(), f"{folder}: there is no version {version + 1}"
                assert newest, f"{folder}: no commit carries a generation"
                self.checked_versions[folder] = version, newest


def _outcome(job: Job) -> str:
    """How it ended. AssertionError for what no job may say, whatever runs beside it."""
    status = job.process.wait()
    if status == -signal.SIGKILL:
        return "killed"
    code = ""
    with contextlib.suppress(json.JSONDecodeError):
        code = job.result.get("error", {}).get("code", "")
    # 1: the other one has the lease or the slot; 2: not the moment for this; 4: a table is being loaded. Not 5: none of
    # them may make a row that the source does not have.
    assert status in (0, 1, 2, 4), f"{status}: {job.log[-3000:]}"
    assert code != "unexpected", job.log[-3000:]
    return f"{status}{f' ({code})' if code else ''}"


@dataclass
class LeaseWatch:
    """Looks beside a round which sessions live, and behind it whether a lease was taken from one that did."""

    database: Database
    pipeline: Pipeline
    seen: dict[str, datetime] = field(default_factory=dict)
    """Until when at least a session lived, by its application_name."""
    _failures: list[Exception] = field(default_factory=list)

    def __enter__(self) -> LeaseWatch:
        self._before = DeltaTable(registry_path(self.pipeline.lake_path())).version()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def refuse_two_holders(self) -> None:
        """Holders come one after the other: each when the one before had let go, or its session was gone."""
        assert not self._failures, self._failures
        assert self.seen, "no session was seen"
        for before, after in pairwise(self._records()):
            if before["name"] != after["name"] or before["holder"] == after["holder"] or not before["session"]:
                continue
            story = f"{before} was followed by {after}"
            assert after["session"], f"another than the holder has let go: {story}"
            # A job looks whether the holder lives before it writes.
            seen = self.seen.get(before["session"])
            assert seen is None or seen < after["written_at"], f"the holder lived at {seen}: {story}"

    def _records(self) -> list[dict[str, Any]]:
        """Every record of a lease since the round began and the one before that, by lease, in order."""
        found = {}
        path = registry_path(self.pipeline.lake_path())
        for version in range(self._before, DeltaTable(path).version() + 1):
            for row in read_rows(SmallTable(read_snapshot(path, version)), {"kind": ("lease", "lease")}).to_pylist():
                found[row["name"], row["revision"]] = {**json.loads(row["document"]), "written_at": row["written_at"]}
        return [found[key] for key in sorted(found)]

    def _run(self) -> None:
        living = "select application_name from pg_stat_activity where application_name like 'headwater %'"
        try:
            with self.database.superuser() as connection:
                while not self._stop.wait(0.02):
                    now = datetime.now(UTC)
                    self.seen.update((session, now) for (session,) in connection.execute(living))
        except Exception as error:
            self._failures.append(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--only", type=int, help="play the round of this seed alone")
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    os.environ.setdefault("JDK_JAVA_OPTIONS", SHORT_LIVED_JVM)
    with (
        tempfile.TemporaryDirectory(prefix="headwater-soak-") as folder,
        tempfile.TemporaryDirectory(prefix="headwater-soak-server-") as server_folder,
        EmbeddedServer(server_folder, durable=False) as server,
        replicated_bank(server, Path(folder), seed=options.seed) as bank,
    ):
        rounds = Rounds(bank, build_session("shop"))
        number, idle, count = 1, 0, options.rounds if options.only is None else 1
        while number <= count:
            seed = drawn.randrange(1 << 31) if options.only is None else options.only
            print(f"round {number} of {count}, seed {seed}: ", end="", flush=True)
            began = time.monotonic()
            try:
                told, counts = rounds.run(seed)
                idle = 0 if counts else idle + 1
                assert idle < MOST_IDLE, f"in {idle} rounds after each other no job has succeeded"
            except BaseException:
                evidence = shutil.copytree(folder, f"{folder}-failed")
                print(f"failed; again: --only {seed}; the lake, and what every job said: {evidence}")
                raise
            number += counts
            ended = f"exact after {time.monotonic() - began:.0f} s"
            print(f"{told}; {ended}{'' if counts else ', but no job succeeded: not counted'}", flush=True)
            for file in (*Path(folder).glob("*.log"), *Path(folder).glob("*.json")):
                file.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
