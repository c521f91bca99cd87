"""Catching up after a stop under load: the source goes on writing at HEADWATER_BENCH_RATE while nobody replicates for
HEADWATER_BENCH_OUTAGE seconds, and after it. Reference: the source's own rate in the same run."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from figures import figure
from log_sealing import Load, driver
from mixed_load import make_mixed_tables, pipeline, server

from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.monitor.status import status

RATE = int(os.environ.get("HEADWATER_BENCH_RATE", "5000"))
OUTAGE = float(os.environ.get("HEADWATER_BENCH_OUTAGE", "600"))
_CAUGHT_UP = 2.0  # seconds behind the source


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        wanted = pipeline(Path(scratch), source, *make_mixed_tables(source))
        load(wanted)
        root = wanted.lake_path()
        with Load(source) as load_:
            load_.rate = RATE
            with driver(wanted):
                time.sleep(10)
            stopped = time.perf_counter()
            time.sleep(OUTAGE)
            before = read_position_file(root)
            assert before is not None
            began, position, estimates = time.perf_counter(), before.position.lsn, []
            behind = [mark for mark in load_.marks if mark[0] > position]
            with driver(wanted):
                while True:
                    time.sleep(1.0)
                    file, now = read_position_file(root), time.perf_counter()
                    assert file is not None
                    shown = status(wanted)
                    if shown["eta_seconds"] is not None:
                        estimates.append((round(now - began, 1), shown["eta_seconds"], shown["bottleneck"]))
                    late = next((moment for lsn, moment in load_.marks if lsn > file.position.lsn), now)
                    if now - late < _CAUGHT_UP:
                        break
            seconds = now - began
            written = load_.marks[-1][0] - behind[0][0]
            what = f"catching up after a stop of {OUTAGE:.0f} s while {RATE:,} changes/s go on"
            applied = written / seconds
            figure(what, seconds, "s", "the stop", began - stopped)
            figure(f"{what}: log applied", applied / 1e6, "MB/s", "log written", written / (now - behind[0][1]) / 1e6)
            figure(f"{what}: rate", (seconds + began - stopped) / seconds, "times the source's rate")
            for after, left, bottleneck in estimates[:: max(1, len(estimates) // 8)]:
                print(f"after {after} s: {left} s to go, held up by {bottleneck}")


if __name__ == "__main__":
    main()
