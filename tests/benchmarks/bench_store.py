"""A lake in S3 behind 20 ms for each request: how fresh it is, how many requests it costs, and what these cost a month.

The same load as `bench_latency.py`, and the same again with the lake on disk as the reference. The server is versitygw,
a store on this machine's disk (`make servers`); a program before it makes every request take longer, and counts.
Prices are list prices of S3 in us-east-1: 5 dollars for a million of PUT and LIST, 0.40 for a million of GET and HEAD.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench_latency import RATE, at_rate
from figures import figure
from mixed_load import TABLES, make_mixed_tables, pipeline, server

sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures.object_stores import S3Server, running
from fixtures.store_faults import MoodyStore
from headwater.demo.postgres import EmbeddedServer
from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.replicate import replicate
from headwater.waiting.lookout import SharedLookout
from headwater.waiting.wait import requested_here
from headwater.waiting.waiter import Waiter
from servers.install import VERSITYGW

SECONDS = float(os.environ.get("HEADWATER_BENCH_SECONDS", "60"))
IDLE_SECONDS = float(os.environ.get("HEADWATER_BENCH_IDLE", "180"))
SETTLE_SECONDS, CALM = 1800.0, 40
"""At rest is who asks for less than so much a minute: before, upkeep goes through what the load has left."""
LATENCY = 0.02
SENSORS = 1000
MONTH = 30 * 24 * 3600.0
DOLLARS = {"PUT": 5e-6, "LIST": 5e-6, "GET": 0.4e-6, "HEAD": 0.4e-6, "DELETE": 0.0}


@contextmanager
def driver(wanted: Pipeline) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=replicate, args=(wanted, None, None, stop))
    thread.start()
    try:
        while read_position_file(wanted.lake_path()) is None:
            time.sleep(0.05)
        yield
    finally:
        stop.set()
        thread.join()


def epochs(wanted: Pipeline) -> int:
    file = read_position_file(wanted.lake_path())
    return file.epoch if file is not None else 0


class Counted:
    """The requests since it was made."""

    def __init__(self, store: MoodyStore) -> None:
        self._store, self._before, self._began = store, store.requests, time.monotonic()

    def so_far(self) -> dict[str, int]:
        return {kind: count - self._before[kind] for kind, count in self._store.requests.items()}

    def dollars_a_month(self) -> float:
        spent = sum(DOLLARS[kind] * count for kind, count in self.so_far().items())
        return spent * MONTH / (time.monotonic() - self._began)


def lag(wanted: Pipeline, source: EmbeddedServer, where: str) -> tuple[float, float]:
    """Median and 99th percentile; of the second half, when the JVM and all else is warm."""
    _, found = at_rate(source, wanted.lake_path(), RATE, SECONDS)
    half = [delay for _, delay in found][len(found) // 2 :]
    assert len(half) > 1, f"nothing was published {where}"
    return statistics.median(half), statistics.quantiles(half, n=100)[98]


def settle(store: MoodyStore) -> None:
    latest = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < latest:
        minute = Counted(store)
        time.sleep(60)
        if sum(minute.so_far().values()) < CALM:
            return


def waits(wanted: Pipeline, store: MoodyStore) -> None:
    """A thousand waits of one triggerer, for what nobody writes, beside a driver at rest."""
    lookout = SharedLookout(wanted)
    end = f"{(1 << 62) - 1 >> 32:X}/0"
    waiting = [Waiter(wanted, requested_here(wanted, end, 3600), lookout) for _ in range(SENSORS)]
    seconds, counted = 20.0, None
    until = time.monotonic() + seconds + 2
    while time.monotonic() < until:
        lookout.refresh()
        for one in waiting:
            one.look()
        lookout.question()
        if counted is None:
            counted = Counted(store)  # the first look reads the lake
        time.sleep(lookout.longest_pause)
    assert counted is not None
    figure(
        f"{SENSORS:,} waits of one triggerer, a driver at rest beside them",
        sum(counted.so_far().values()) / seconds,
        "requests/s",
    )


def main() -> None:
    with (
        server() as source,
        tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch,
        tempfile.TemporaryDirectory(prefix="headwater-s3-") as folder,
    ):
        tables, objects = make_mixed_tables(source), Path(folder) / "objects"
        objects.mkdir()
        on_disk = pipeline(Path(scratch), source, *tables)
        load(on_disk)
        with driver(on_disk):
            disk = lag(on_disk, source, "on disk")
        keys = ("headwater", "headwater-secret")
        with (
            running(
                lambda port: [
                    VERSITYGW,
                    "--port",
                    f"127.0.0.1:{port}",
                    "--region",
                    "us-east-1",
                    "--quiet",
                    "posix",
                    objects,
                ],
                Path(folder),
                answers=403,
                environment={"ROOT_ACCESS_KEY_ID": keys[0], "ROOT_SECRET_ACCESS_KEY": keys[1]},
            ) as (address, process),
            MoodyStore(address, latency=LATENCY) as store,
        ):
            behind = S3Server(address, "us-east-1", *keys, objects, process)
            # Who measures goes past what makes requests slow, and is not counted.
            os.environ |= {f"AWS_{name.upper()}": value for name, value in behind.options.items()}
            os.environ["AWS_ENDPOINT_URL"] = behind.endpoint
            lake = behind.through(store.address).lake("lake")
            (Path(scratch) / "s3").mkdir()
            wanted = pipeline(Path(scratch) / "s3", source, *tables, pipeline="in_s3", lake=lake)
            load(wanted)
            what = f"{RATE:,} changes/s over {TABLES} tables, {LATENCY * 1000:.0f} ms a request, {SECONDS:.0f} s"
            with driver(wanted):
                counted, before = Counted(store), epochs(wanted)
                slow = lag(wanted, source, "in S3")
                published, found, monthly = epochs(wanted) - before, counted.so_far(), counted.dollars_a_month()
                for name, ours, theirs in zip(("p50", "p99"), slow, disk, strict=True):
                    figure(f"commit to readable in S3, {what}: {name}", ours, "s", "the same on disk", theirs)
                figure(
                    f"an epoch in S3, {what}",
                    sum(found.values()) / published,
                    "requests",
                    "two, and two for each table",
                    2 + 2 * TABLES,
                )
                for kind, count in found.items():
                    figure(f"an epoch in S3, {what}: {kind}", count / published, "requests")
                figure(f"a month in S3, {what}", monthly, "dollars of requests")
                settle(store)
                rest = Counted(store)
                time.sleep(IDLE_SECONDS)
                minutes = IDLE_SECONDS / 60
                figure(
                    f"a driver at rest in S3, {TABLES} tables", sum(rest.so_far().values()) / minutes, "requests/min"
                )
                for kind, count in rest.so_far().items():
                    figure(f"a driver at rest in S3, {TABLES} tables: {kind}", count / minutes, "requests/min")
                figure(f"a month at rest in S3, {TABLES} tables", rest.dollars_a_month(), "dollars of requests")
                waits(wanted, store)


if __name__ == "__main__":
    main()
