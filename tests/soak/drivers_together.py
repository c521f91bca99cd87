"""Loads, reloads, maintenance, repairs and drivers on one pipeline, all started together, and some of them killed.

`python tests/soak/drivers_together.py --rounds 100 --seed N`: each round draws its own seed from N's and prints it with
what became of every job; `--only SEED` is that round alone. The first round that fails ends the program. After each
round no lease had two holders, every cut is a state that the source had, and the lake equals the source.

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
from pathlib import Path
from typing import TYPE_CHECKING, Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures.bank import TABLES, Bank, assert_cuts_consistent, replicated_bank, writing
from fixtures.jobs import Job, assert_equal, catch_up, load_tables, registry_of, states_of, until
from headwater.embedded import EmbeddedServer
from headwater.jobs import lease
from headwater.session import SHORT_LIVED_JVM, build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RELOADED: Final = [name for name in TABLES if name != "public.keyed"]  # a table with a history is not reloaded
KILLED_SHARE: Final = 0.4
START_SECONDS: Final = 2.0
DRIVER_SECONDS: Final = 30
END_SECONDS: Final = 240.0


@dataclass
class Rounds:
    """Rounds on one bank; `run` plays one and raises what it finds."""

    bank: Bank
    spark: SparkSession
    driver_seconds: int = DRIVER_SECONDS
    checked_epoch: int = 0

    def run(self, seed: int) -> str:
        """What became of each job, in words."""
        drawn = random.Random(seed)
        with LeaseWatch(self.bank) as watch, contextlib.ExitStack() as running:
            with writing(self.bank.database, seed, pace=0.05):
                started = [(command, running.enter_context(job)) for command, job in self._start(drawn)]
                fates = [self._fate(drawn) for _ in started]
                self._let_them_work(started, fates)
            told = [f"{command[0]} {_outcome(job)}" for command, job in started]
            for _, job in started:
                until(lambda job=job: not job.left, "what a job had started has ended")  # type: ignore[misc]
        watch.refuse_two_holders()
        self._recover()
        return ", ".join(told)

    def _start(self, drawn: random.Random) -> Iterator[tuple[tuple[str, ...], Job]]:
        commands = [
            ("replicate", "--max-seconds", str(self.driver_seconds)),
            ("replicate", "--take-over", "--max-seconds", str(self.driver_seconds)),
            ("load", "--again", "--table", drawn.choice(TABLES)),
            ("reload", "--table", drawn.choice(RELOADED)),
            ("maintain",),
            ("verify", "--repair", "--table", drawn.choice(TABLES)),
        ]
        drawn.shuffle(commands)
        for command in commands:
            time.sleep(drawn.uniform(0, START_SECONDS / len(commands)))
            yield command, Job(self.bank.pipeline, *command, spark=self.spark)

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
    """Looks beside a round whether a lease passes to a second holder while the session of the first one lives."""

    bank: Bank
    _holders: dict[str, dict[str, str]] = field(default_factory=dict)
    _found: list[str] = field(default_factory=list)

    def __enter__(self) -> LeaseWatch:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def refuse_two_holders(self) -> None:
        assert not self._found, self._found
        assert self._holders, "nobody has held a lease"

    def _run(self) -> None:
        try:
            with self.bank.database.superuser() as connection:
                while not self._stop.wait(0.1):
                    for held in registry_of(self.bank.pipeline).leases.values():
                        before = self._holders.setdefault(held.name, {})
                        if not held.session:
                            before.pop(held.holder, None)
                            continue
                        for holder, session in list(before.items()):
                            # One that let go between two looks has closed its session by now, or is about to.
                            if holder != held.holder and lease.is_alive(connection, session):
                                self._stop.wait(0.5)
                                if lease.is_alive(connection, session):
                                    self._found.append(f"{held.name}: {holder} and {held.holder}")
                        self._holders[held.name] = {held.holder: held.session}
        except Exception as error:
            self._found.append(repr(error))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--only", type=int, help="play the round of this seed alone")
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    seeds = [options.only] if options.only is not None else [drawn.randrange(1 << 31) for _ in range(options.rounds)]
    os.environ.setdefault("JDK_JAVA_OPTIONS", SHORT_LIVED_JVM)
    with (
        tempfile.TemporaryDirectory(prefix="headwater-soak-") as folder,
        tempfile.TemporaryDirectory(prefix="headwater-soak-server-") as server_folder,
        EmbeddedServer(server_folder, durable=False) as server,
        replicated_bank(server, Path(folder), seed=options.seed) as bank,
    ):
        rounds = Rounds(bank, build_session("shop"))
        for number, seed in enumerate(seeds, 1):
            print(f"round {number} of {len(seeds)}, seed {seed}: ", end="", flush=True)
            began = time.monotonic()
            try:
                told = rounds.run(seed)
            except BaseException:
                evidence = shutil.copytree(folder, f"{folder}-failed")
                print(f"failed; again: --only {seed}; the lake, and what every job said: {evidence}")
                raise
            print(f"{told}; exact after {time.monotonic() - began:.0f} s", flush=True)
            for file in (*Path(folder).glob("*.log"), *Path(folder).glob("*.json")):
                file.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
