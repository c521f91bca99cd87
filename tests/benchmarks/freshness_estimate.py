"""How near to the truth a wait's estimate is, while HEADWATER_BENCH_COMMITS (2,000,000) single-row commits over ten
tables are caught up with: at each look, the seconds that were still to go by the estimate beside those that it took.

Reference of the same run: the average speed since the lake was first seen to move.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from figures import figure
from mixed_load import make_mixed_tables, pipeline, server

from headwater.load.load import load
from headwater.pipeline_file.pipeline import load_pipeline
from headwater.replicate.replicate import replicate
from headwater.waiting.request import asked
from headwater.waiting.waiter import Waiter

COMMITS = int(os.environ.get("HEADWATER_BENCH_COMMITS", "2000000"))
LOOK_SECONDS = 0.25
STABLE = 0.2
"""Of the wait: before that the speed is not known yet, by either way."""


def estimates(file: str) -> tuple[list[tuple[float, float, float]], float]:
    """Moments, each with the estimate and with the one of the reference; and when the wait was over."""
    waiter = Waiter(load_pipeline(file), asked("now", 1800, keep=60, owner="benchmark"))
    began = time.perf_counter()
    first: tuple[float, int] | None = None  # where it was, and when, before it was seen to move
    found = []
    while waiter.look() is None:
        now, seen = time.perf_counter() - began, waiter.progress
        if seen is not None and seen.gap_bytes is not None:
            if first is None or seen.gap_bytes >= first[1]:
                first = now, seen.gap_bytes
            elif seen.eta_seconds is not None:
                by_average = (now - first[0]) * seen.gap_bytes / (first[1] - seen.gap_bytes)
                found.append((now, seen.eta_seconds, by_average))
        time.sleep(LOOK_SECONDS)
    return found, time.perf_counter() - began


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        wanted = pipeline(Path(scratch), source, *make_mixed_tables(source))
        load(wanted)
        with source.connect("postgres") as connection:
            connection.execute("set synchronous_commit = off")
            connection.execute(f"call mixed({COMMITS})")
        stop = threading.Event()
        driver = threading.Thread(target=replicate, args=(wanted, None, None, stop))
        driver.start()
        try:
            with multiprocessing.get_context("spawn").Pool(1) as waiting:
                found, end = waiting.apply(estimates, (wanted.file,))
        finally:
            stop.set()
            driver.join()
    moments, ours, by_average = np.array(found).T
    left = end - moments
    judged = (moments > STABLE * end) & (left > 1)
    off, reference = (np.abs(guess - left)[judged] / left[judged] for guess in (ours, by_average))
    what, average = (
        f"a wait's estimate while {COMMITS:,} commits are caught up with, off by",
        "the average speed so far",
    )
    figure(f"{what}: median", float(np.median(off)) * 100, "%", average, float(np.median(reference)) * 100)
    nine = (float(np.quantile(each, 0.9)) * 100 for each in (off, reference))
    figure(f"{what}: nine of ten within", next(nine), "%", average, next(nine))
    figure(f"catching up with {COMMITS:,} commits", end, "s")


if __name__ == "__main__":
    main()
