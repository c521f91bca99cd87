"""A twentieth of a table reloaded beside a driver, as a partition and by a predicate, against the whole table.

HEADWATER_BENCH_ROWS rows (2,000,000) of ten columns in 20 partitions by ranges of the key; the predicate's rows lie in
two of them. Each is reloaded HEADWATER_BENCH_ROUNDS times (2), in turns, and the fastest counts.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

from figures import figure
from mixed_load import make_parted_table, pipeline, server

from headwater.load.load import load
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.reload.reload import reload
from headwater.replicate.replicate import replicate
from headwater.spark.session import build_session

ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "2000000"))
ROUNDS = int(os.environ.get("HEADWATER_BENCH_ROUNDS", "2"))
PARTS = 20
TABLE = TableName("public", "parted")


def main() -> None:
    size = ROWS // PARTS
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        make_parted_table(source, PARTS, size)
        wanted = pipeline(Path(scratch), source, str(TABLE))
        build_session()
        load(wanted, [TABLE])
        stop = threading.Event()
        driver = threading.Thread(target=replicate, args=(wanted, None, None, stop))
        driver.start()
        seconds: dict[str, float] = {}
        try:
            while not status(wanted)["running"]:
                time.sleep(0.2)
            where = f"id between {size * 3 // 2} and {size * 5 // 2 - 1}"
            ways = {"partition": ([TableName("public", "parted_7")], ""), "predicate": ([], where), "whole": ([], "")}
            for _ in range(ROUNDS):
                for what, (partitions, predicate) in ways.items():
                    done = reload(wanted, TABLE, partitions, predicate)
                    assert done["tables"][str(TABLE)]["rows"] == (size * PARTS if what == "whole" else size), done
                    seconds[what] = min(done["seconds"], seconds.get(what, done["seconds"]))
        finally:
            stop.set()
            driver.join()
    whole = f"the whole table of {size * PARTS:,} rows"
    for what in ("partition", "predicate"):
        figure(f"{size:,} rows reloaded beside a driver, by {what}", seconds[what], "s", whole, seconds["whole"])


if __name__ == "__main__":
    main()
