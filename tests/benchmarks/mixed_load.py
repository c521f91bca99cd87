"""What the benchmarks share: an embedded PostgreSQL, the tables of the mixed load, and one JSON line per figure."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from headwater.config import Pipeline, load_pipeline
from headwater.embedded import EmbeddedServer

TABLES = 10
ROWS = 10_000


@contextlib.contextmanager
def server() -> Iterator[EmbeddedServer]:
    """A server without fsync: the disk of the machine is not what is measured."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        Path(folder).chmod(0o755)
        with EmbeddedServer(Path(folder) / "server", durable=False) as running:
            yield running


def pipeline(folder: Path, source: EmbeddedServer, *tables: str | dict[str, Any], **sections: Any) -> Pipeline:
    document = {
        "pipeline": "bench",
        "source": {"connection": source.conninfo("postgres")},
        "lake": {"root": (folder / "lake").as_uri()},
        "tables": list(tables),
        **sections,
    }
    file = folder / "bench.yaml"
    file.write_text(yaml.safe_dump(document))
    return load_pipeline(file)


def make_mixed_tables(source: EmbeddedServer) -> list[str]:
    """Ten tables of `ROWS` rows, and a procedure that makes single-row commits, 20/60/20 insert/update/delete."""
    with source.connect("postgres") as connection:
        for number in range(TABLES):
            connection.execute(
                f"create table t{number} (id bigint primary key, a int, b int, note text, amount numeric(12,2), "
                "at timestamptz default now())"
            )
            connection.execute(
                f"insert into t{number} select g, g, g, 'note ' || g, g, now() from generate_series(1, {ROWS}) g"
            )
        connection.execute(
            """
            create procedure mixed(first bigint, commits int) language plpgsql as $$
            declare i bigint; t text; k bigint;
            begin
              for i in first .. first + commits - 1 loop
                t := 't' || (i % 10);
                k := 1 + (i::bigint * 7919) % 10000;
                if i % 5 = 0 then
                  execute format('insert into %I values ($1, 1, 2, $2, 3.5, now())', t) using 1000000 + i, 'new ' || i;
                elsif i % 5 = 4 then
                  execute format('delete from %I where id = $1', 't' || ((i - 4) % 10)) using 1000000 + i - 4;
                else
                  execute format('update %I set a = a + 1, note = $2 where id = $1', t) using k, 'changed ' || i;
                end if;
                commit;
              end loop;
            end $$
            """
        )
    return [f"public.t{number}" for number in range(TABLES)]


def report(benchmark: str, **figures: Any) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)
