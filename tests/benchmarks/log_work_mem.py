"""What a low `logical_decoding_work_mem` costs the source: walsender CPU for one large transaction, by setting.

    PYTHONPATH=spark_jobs python tests/benchmarks/log_work_mem.py

`pg_recvlogical` reads the same transaction with each setting, twice; the better of two counts. The reference is the
server's own default, 64 MB. `spilled`: what the server wrote to its disk because it could or would not send it.
"""

from __future__ import annotations

from backlogs import Inserts, Reading, reference, written
from figures import figure
from mixed_load import server

SETTINGS = ("64kB", "512kB", "4MB", "64MB")
WORKLOAD = Inserts("100 B, 10 columns", 100, 10)


def main() -> None:
    slots = {(setting, turn): f"mem_{setting.lower()}_{turn}" for turn in range(2) for setting in SETTINGS}
    readings: dict[str, list[Reading]] = {}
    with server() as source, written(source, WORKLOAD, list(slots.values())) as (_, end):
        for (setting, _), slot in slots.items():
            readings.setdefault(setting, []).append(reference(source, slot, end, setting))
        with source.connect("postgres") as connection:
            connection.execute("select pg_stat_force_next_flush()")
            statistics = dict(
                connection.execute(
                    "select slot_name, array[stream_count, stream_bytes, spill_bytes] from pg_stat_replication_slots"
                ).fetchall()
            )
    default = min(reading.walsender_cpu for reading in readings["64MB"])
    for setting, both in readings.items():
        streams, streamed, spilled = statistics[slots[setting, 0]]
        best = min(reading.walsender_cpu for reading in both)
        what = f"logical_decoding_work_mem of {setting}, one transaction of {WORKLOAD.rows:,} rows"
        figure(f"{what}: processor of the walsender", best, "s", "64MB", default)
        figure(f"{what}: to the end", min(reading.seconds for reading in both), "s")
        figure(f"{what}: segments", streams, "segments")
        figure(f"{what}: streamed", streamed / 1e6, "MB")
        figure(f"{what}: spilled at the source", spilled / 1e6, "MB")


if __name__ == "__main__":
    main()
