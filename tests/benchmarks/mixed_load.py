"""What the benchmarks share: an embedded PostgreSQL and the tables of the mixed load."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import yaml
from deltalake import DeltaTable, QueryBuilder

from headwater.demo.postgres import EmbeddedServer
from headwater.lake.paths import table_path
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline

TABLES = 10
ROWS = 10_000
BODY = ", repeat(md5(g::text), 320)"


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


def make_parted_table(source: EmbeddedServer, parts: int, size: int) -> None:
    """`parted`, of ten columns, in so many partitions by ranges of the key, with `size` rows each."""
    with source.connect("postgres") as connection:
        connection.execute(
            "create table parted (id bigint primary key, a int, note text, amount numeric(12,2), at timestamptz, "
            "day date, flag bool, ratio float8, tag uuid, category text) partition by range (id)"
        )
        for number in range(parts):
            bounds = f"from ({number * size}) to ({(number + 1) * size})"
            connection.execute(f"create table parted_{number} partition of parted for values {bounds}")
        connection.execute(
            "insert into parted select g, g % 1000, 'note ' || g, g * 1.25, now() - g * interval '1 second', date "
            "'2020-01-01' + (g % 1000)::int, g % 2 = 0, g * 0.5, md5(g::text)::uuid, 'category ' || g % 50 "
            f"from generate_series(0, {size * parts - 1}::bigint) g"
        )
        connection.execute("vacuum analyze parted")


def make_mixed_tables(source: EmbeddedServer) -> list[str]:
    """Ten tables of `ROWS` rows and ten columns of mixed types, the first one with a 10 kB text besides that updates
    leave alone; and `mixed(commits)`, which makes single-row commits: of each table 20 % inserts, 60 % updates, 20 %
    deletes, of rows that are `ROWS` / 2 inserts old."""
    with source.connect("postgres") as connection:
        for number in range(TABLES):
            connection.execute(
                f"create table t{number} (id bigint primary key, a int, b smallint, note text, amount numeric(12,2), "
                "ratio double precision, flag boolean, day date, at timestamptz, ref uuid)"
            )
            if number == 0:
                connection.execute("alter table t0 add body text")
                connection.execute("alter table t0 alter body set storage external")
            connection.execute(
                f"insert into t{number} select g, g, g % 100, 'note ' || g, g / 7.0, g / 3.0, g % 2 = 0, "
                "date '2020-01-01' + g % 1000, now(), md5(g::text)::uuid"
                f"{BODY if number == 0 else ''} from generate_series(1, {ROWS}) g"
            )
        connection.execute("create sequence mixed_number minvalue 0 start 0 cache 1000")
        connection.execute(
            f"""
            create procedure mixed(commits int) language plpgsql as $$
            declare i bigint; g bigint; n bigint; t text;
            begin
              for _ in 1 .. commits loop
                i := nextval('mixed_number');
                t := 't' || (i % {TABLES});
                n := i / {TABLES};
                g := n / 5;
                if n % 5 = 0 then
                  execute format('insert into %I select $1, g, g %% 100, $2, g / 7.0, g / 3.0, true, current_date, '
                                 'now(), md5($2)::uuid%s from (values ($1)) v(g)',
                                 t, case when t = 't0' then $b${BODY}$b$ else '' end) using {ROWS} + 1 + g, 'new ' || i;
                elsif n % 5 = 4 then
                  execute format('delete from %I where id = $1', t) using {ROWS // 2} + 1 + g;
                else
                  execute format('update %I set a = a + 1, note = $2, amount = amount + 0.01, at = now() where id = $1',
                                 t) using 1 + (n * 7919) % {ROWS // 2}, 'changed ' || i;
                end if;
                commit;
              end loop;
            end $$
            """
        )
    return [f"public.t{number}" for number in range(TABLES)]


def assert_equal(source: EmbeddedServer, wanted: Pipeline, names: list[str]) -> None:
    """Every value of every row, at the source and in the lake."""
    for name in names:
        with source.connect("postgres") as connection:
            cursor = connection.execute(f"select * from {name} order by id")
            columns = [column.name for column in cursor.description or []]
            rows = [tuple(str(v) if isinstance(v, UUID) else v for v in row) for row in cursor]
        lake = QueryBuilder().register("t", DeltaTable(table_path(wanted.lake_path(), name.replace(".", "/"))))
        found = pa.table(lake.execute("select * from t order by id").read_all()).select(columns).to_pylist()
        assert [tuple(row.values()) for row in found] == rows, name
