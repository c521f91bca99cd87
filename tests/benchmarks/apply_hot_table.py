"""One hot table: the same single-row commits (20/60/20) drained from one table, and from ten, in turns.

HEADWATER_BENCH_CHANGES commits each (100,000). Both backlogs touch 100,000 rows of the same columns.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

from figures import figure
from mixed_load import pipeline, server

from headwater.demo.postgres import EmbeddedServer
from headwater.load.load import load
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.replicate import replicate

CHANGES = int(os.environ.get("HEADWATER_BENCH_CHANGES", "100000"))
ROUNDS = 3
ROWS = 100_000

_DRIVE = """
create procedure drive(tables int, first bigint, commits int) language plpgsql as $$
declare i bigint; t text; k bigint; rows int := 100000 / tables;
begin
  for i in first .. first + commits - 1 loop
    t := case tables when 1 then 'hot' else 'spread' || (i % tables) end;
    if i % 5 = 0 then
      execute format('insert into %I values ($1, 1, 2, $2, 3.5, now())', t) using 1000000 + i, 'new ' || i;
    elsif i % 5 = 4 then
      t := case tables when 1 then 'hot' else 'spread' || ((i - 4) % tables) end;
      execute format('delete from %I where id = $1', t) using 1000000 + i - 4;
    else
      k := 1 + ((i::bigint / tables) * 7919) % rows;
      execute format('update %I set a = a + 1, note = $2 where id = $1', t) using k, 'changed ' || i;
    end if;
    commit;
  end loop;
end $$
"""


def make_tables(source: EmbeddedServer) -> list[str]:
    names = ["hot", *(f"spread{number}" for number in range(10))]
    with source.connect("postgres") as connection:
        for name in names:
            rows = ROWS if name == "hot" else ROWS // 10
            connection.execute(
                f"create table {name} (id bigint primary key, a int, b int, note text, amount numeric(12,2), "
                "at timestamptz default now())"
            )
            connection.execute(
                f"insert into {name} select g, g, g, 'note ' || g, g, now() from generate_series(1, {rows}) g"
            )
        connection.execute(_DRIVE)
    return [f"public.{name}" for name in names]


def drain(source: EmbeddedServer, wanted: Pipeline, tables: int, first: int, changes: int) -> float:
    """Changes a second of a backlog over so many tables."""
    with source.connect("postgres") as connection:
        connection.execute("set synchronous_commit = off")
        connection.execute(f"call drive({tables}, {first}, {changes})")
    started = time.perf_counter()
    replicate(wanted, "now", None, threading.Event())
    return changes / (time.perf_counter() - started)


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        wanted = pipeline(Path(scratch), source, *make_tables(source))
        load(wanted)
        for tables in (1, 10):
            drain(source, wanted, tables, 1, 2000)  # every table's index is built
        hot, spread = [], []
        for turn in range(1, ROUNDS + 1):
            hot.append(drain(source, wanted, 1, turn * 10_000_000, CHANGES))
            spread.append(drain(source, wanted, 10, turn * 10_000_000, CHANGES))
        what = f"{CHANGES:,} single-row commits on one table, drained"
        figure(what, statistics.median(hot), "changes/s", "the same changes over ten tables", statistics.median(spread))


if __name__ == "__main__":
    main()
