"""A thousand deferred sensors on one pipeline: what their waiting costs, when they wake up, and whether replication
goes slower for them.

First the lake is fresh already: what a trigger takes that has nothing to wait for. Then a backlog of the mixed load is
drained by a driver of its own process, with HEADWATER_BENCH_SENSORS (1,000) triggers in this process that wait for its
end, and without any, in turns. Before that nobody drains and the triggers only wait: the sessions that the source sees,
the reads of the position file and this process's time are counted, beside those of one trigger. `wake`: from the moment
at which the position file shows the target, by a look of its own every 10 ms, to each event; without Airflow's way from
there to the next task.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from figures import figure
from mixed_load import make_mixed_tables, pipeline, server

from headwater.demo.postgres import EmbeddedServer
from headwater.lake import reader as status
from headwater.lake.position_file import PositionFile, read_position_file
from headwater.lake.requirements import Target
from headwater.load.load import load
from headwater.pipeline_file.pipeline import Pipeline
from headwater.waiting.source_state import ask_source

SENSORS = int(os.environ.get("HEADWATER_BENCH_SENSORS", "1000"))
CHANGES = int(os.environ.get("HEADWATER_BENCH_CHANGES", "500000"))
ROUNDS = int(os.environ.get("HEADWATER_BENCH_ROUNDS", "3"))
FRESH = 100
IDLE_SECONDS = 10.0


class Reads:
    """How often the position file is read for waits."""

    def __init__(self) -> None:
        self.count = 0
        vars(status)["read_position_file"] = self

    def __call__(self, root: str) -> PositionFile | None:
        self.count += 1
        return read_position_file(root)


def sessions(source: EmbeddedServer) -> int:
    with source.connect("postgres") as connection:
        row = connection.execute("select sessions from pg_stat_database where datname = 'postgres'").fetchone()
    assert row is not None
    return int(row[0])


def trigger(wanted: Pipeline, tables: list[str], target: Target, number: int) -> Any:
    from headwater_airflow.triggers.freshness import FreshnessTrigger

    return FreshnessTrigger(
        pipeline=wanted.file,
        tables=tables,
        target=target.to_json(),
        deadline=(datetime.now(UTC) + timedelta(hours=1)).isoformat(),
        keep_seconds=600,
        owner=f"sensor {number}",
    )


async def woken(waiting: Any) -> float:
    (event,) = [event async for event in waiting.run()]
    moment = time.perf_counter()
    assert event.payload["outcome"] == "satisfied", event.payload
    return moment


def shown(root: str, lsn: int) -> float:
    """When the position file shows `lsn` as published."""
    while (file := read_position_file(root)) is None or file.position.lsn < lsn:
        time.sleep(0.01)
    return time.perf_counter()


def write(source: EmbeddedServer, wanted: Pipeline, changes: int) -> Target:
    """A backlog; its end."""
    with source.connect("postgres") as connection:
        connection.execute("set synchronous_commit = off")
        connection.execute(f"call mixed({changes})")
    position = ask_source(wanted).position
    return Target(position.lsn, position.timeline, position.system_id)


def replicate(wanted: Pipeline, until: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headwater.cli", "replicate", wanted.file, "--until", until]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def fresh(wanted: Pipeline, tables: list[str]) -> None:
    """One trigger after the other whose target the lake has passed, each the only one of its process."""
    position = ask_source(wanted).position
    passed = read_position_file(wanted.lake_path())
    assert passed is not None
    target = Target(passed.position.lsn, position.timeline, position.system_id)

    async def scenario() -> list[float]:
        found = []
        for number in range(FRESH):
            began = time.perf_counter()
            found.append(await woken(trigger(wanted, tables, target, number)) - began)
        return found

    found = asyncio.run(scenario())
    low, high = np.quantile(found[1:], [0.5, 0.99])
    what = f"a trigger whose target has passed, {FRESH} one after the other"
    figure(f"{what}: the first", 1000 * found[0], "ms")
    figure(f"{what}: p50", 1000 * low, "ms")
    figure(f"{what}: p99", 1000 * high, "ms")


def idle(source: EmbeddedServer, wanted: Pipeline, tables: list[str], reads: Reads, sensors: int) -> None:
    """What `sensors` triggers cost that only wait: nobody replicates."""
    target = write(source, wanted, CHANGES)

    async def scenario() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tasks = [asyncio.create_task(woken(trigger(wanted, tables, target, number))) for number in range(sensors)]
        await asyncio.sleep(IDLE_SECONDS)  # they begin
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / sensors
        asked, read, cpu, started = sessions(source), reads.count, time.process_time(), time.perf_counter()
        await asyncio.sleep(IDLE_SECONDS)
        seconds = time.perf_counter() - started
        what = f"{sensors:,} deferred sensors that wait on one pipeline"
        figure(f"{what}: sessions at the source", (sessions(source) - asked) / seconds, "sessions/s")
        figure(f"{what}: reads of the position file", (reads.count - read) / seconds, "reads/s")
        figure(f"{what}: processor", 100 * (time.process_time() - cpu) / seconds, "% of a core")
        figure(f"{what}: memory of each", memory, "KiB")
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


def drain(
    source: EmbeddedServer, wanted: Pipeline, tables: list[str], sensors: int, changes: int = CHANGES
) -> tuple[float, list[float]]:
    """Seconds from a driver's first epoch to the end of a backlog, and each sensor's seconds to wake up."""
    target = write(source, wanted, changes)
    assert target.lsn is not None
    root, found = wanted.lake_path(), {}

    def watch() -> None:
        before = read_position_file(root)
        while read_position_file(root) == before:
            time.sleep(0.01)
        found["first"] = time.perf_counter()
        found["end"] = shown(root, target.lsn or 0)

    async def scenario() -> list[float]:
        tasks = [asyncio.create_task(woken(trigger(wanted, tables, target, number))) for number in range(sensors)]
        await asyncio.sleep(3.0)
        watching = threading.Thread(target=watch)
        watching.start()
        driver = replicate(wanted, "now")
        try:
            moments = await asyncio.gather(*tasks)
            await asyncio.to_thread(watching.join)
        finally:
            await asyncio.to_thread(driver.wait)
        return [moment - found["end"] for moment in moments]

    wakes = asyncio.run(scenario())
    return found["end"] - found["first"], wakes


def report_woken(by: str, rounds: list[list[float]]) -> None:
    what, (low, high) = f"{SENSORS:,} sensors woken at once, by {by}", np.percentile(rounds, [50, 99])
    for share, value in (("p50", low), ("p99", high), ("the last", np.max(rounds))):
        figure(f"{what}: {share}", float(value), "s")


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        os.environ["AIRFLOW_HOME"] = scratch
        os.environ["AIRFLOW__LOGGING__LOGGING_LEVEL"] = (
            "ERROR"  # a thousand triggers say a thousand times why they wait
        )
        tables = make_mixed_tables(source)
        wanted = pipeline(Path(scratch), source, *tables)
        load(wanted)
        replicate(wanted, "now").wait()
        fresh(wanted, tables)
        reads = Reads()
        idle(source, wanted, tables, reads, 1)
        idle(source, wanted, tables, reads, SENSORS)
        drain(source, wanted, tables, 0)  # and what was written for the idle ones
        few = [drain(source, wanted, tables, SENSORS, 100)[1] for _ in range(ROUNDS)]
        report_woken("a few changes", few)
        backlog: list[list[float]] = []
        seconds: dict[int, list[float]] = {0: [], SENSORS: []}
        for _ in range(ROUNDS):
            for sensors in (0, SENSORS):
                took, wakes = drain(source, wanted, tables, sensors)
                seconds[sensors].append(took)
                if wakes:
                    backlog.append(wakes)
        report_woken("a backlog", backlog)
        rate, free = (CHANGES / float(np.median(seconds[waiting])) for waiting in (SENSORS, 0))
        figure(
            f"a backlog of {CHANGES:,} changes drained while {SENSORS:,} sensors wait",
            rate,
            "changes/s",
            "no sensor",
            free,
        )


if __name__ == "__main__":
    main()
