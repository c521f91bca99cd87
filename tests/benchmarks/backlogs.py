"""What the benchmarks of the log engine read: backlogs of known rows, and `pg_recvlogical` beside us on the same ones.

HEADWATER_BENCH_MB sets the size of each backlog in megabytes of row data.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from figures import figure

from headwater.demo.postgres import EmbeddedServer
from headwater.position import format_lsn, parse_lsn

MEGABYTES = int(os.environ.get("HEADWATER_BENCH_MB", "200"))
WORK_MEM = "4MB"
PUBLICATIONS = ("reading", "reading_inserts")

_MIXED_COLUMNS = (
    "customer int, state text, note text, amount numeric(12,2), created timestamptz, day date, paid bool, "
    "rating float8, token uuid"
)
_MIXED_BYTES = 70
"""Of a row of these columns without its note."""


def _mixed_values(number: str, filler: int) -> str:
    return (
        f"({number})::int, (array['open', 'paid', 'shipped'])[1 + mod({number}, 3)], {_text(number, filler)}, "
        f"mod({number}, 1000000) / 100.0, timestamptz '2026-01-01' + ({number}) * interval '1 s', "
        f"date '2026-01-01' + mod({number}, 1000)::int, mod({number}, 2) = 0, ({number}) / 7.0::float8, "
        f"md5(({number})::text)::uuid"
    )


def _text(number: str, size: int) -> str:
    return f"substr(repeat(md5(({number})::text), {size // 32 + 1}), 1, {size})"


def _key(number: str) -> str:
    return f"lpad({number}::text, 36, '0')"


class Backlog(Protocol):
    """`tables`: what is published, made by `create`; `write` makes the log."""

    @property
    def name(self) -> str: ...
    @property
    def tables(self) -> tuple[str, ...]: ...
    def create(self) -> list[str]: ...
    def write(self) -> list[str]: ...


@dataclass(frozen=True)
class Inserts:
    """Inserts into one table of `columns` columns, rows of about `row_bytes`. `commit`: rows of a transaction; None:
    all in one. `mixed`: columns of ten types instead of integers and one text."""

    name: str
    row_bytes: int
    columns: int
    commit: int | None = None
    mixed: bool = False
    tables: tuple[str, ...] = ("t",)

    @property
    def rows(self) -> int:
        rows = min(MEGABYTES * 1_000_000 // self.row_bytes, 1_500_000)
        return rows // (8 if self.commit == 1 else 1)

    def create(self) -> list[str]:
        if self.mixed:
            return [f"create table t (id bigint primary key, {_MIXED_COLUMNS})", *self._stored_as_is("note")]
        integers = self.columns - 1 if self.columns > 10 else self.columns - 2
        names = [f"c{number} int" for number in range(integers)]
        if self.columns > 10:
            return [f"create table t (id bigint primary key, {', '.join(names)})"]
        return [
            f"create table t (id bigint primary key, {', '.join(names)}, filler text)",
            *self._stored_as_is("filler"),
        ]

    @staticmethod
    def _stored_as_is(column: str) -> list[str]:
        return [f"alter table t alter {column} set storage external"]

    def write(self) -> list[str]:
        insert = f"insert into t select g, {self._values()} from generate_series"
        if self.commit is None:
            return [f"{insert}(1, {self.rows}) g"]
        loop = f"""do $$ begin for n in 0 .. {self.rows // self.commit - 1} loop
                   {insert}(n * {self.commit} + 1, (n + 1) * {self.commit}) g; commit; end loop; end $$"""
        return [loop]

    def _values(self) -> str:
        if self.mixed:
            return _mixed_values("g", max(self.row_bytes - _MIXED_BYTES, 1))
        if self.columns > 10:
            return ", ".join(f"g + {number}" for number in range(self.columns - 1))
        filler = max(self.row_bytes - 8 - 4 * (self.columns - 2), 1)
        return ", ".join([*(f"g + {number}" for number in range(self.columns - 2)), _text("g", filler)])


@dataclass(frozen=True)
class Updates:
    """Every row of one table of ten mixed columns on 36-byte text keys, updated; then a quarter of them gets another
    key, which sends an old tuple, and a quarter is deleted. `commit`: keys of a transaction."""

    name: str
    row_bytes: int
    commit: int
    tables: tuple[str, ...] = ("t",)

    def create(self) -> list[str]:
        filler = max(self.row_bytes - _MIXED_BYTES - 28, 1)
        return [
            f"create table t (id text primary key, {_MIXED_COLUMNS})",
            f"insert into t select {_key('g')}, {_mixed_values('g', filler)} from generate_series(1, {self._keys}) g",
        ]

    @property
    def _keys(self) -> int:
        return min(MEGABYTES * 1_000_000 // self.row_bytes, 1_000_000) * 2 // 3

    def write(self) -> list[str]:
        first, last = _key(f"(n * {self.commit} + 1)"), _key(f"((n + 1) * {self.commit})")
        of_chunk = f"id between {first} and {last}"
        loop = f"""do $$ begin for n in 0 .. {self._keys // self.commit - 1} loop
                   update t set customer = customer + 1, amount = amount + 1 where {of_chunk};
                   update t set id = overlay(id placing 'moved' from 1) where {of_chunk} and customer % 4 = 0;
                   delete from t where {of_chunk} and customer % 4 = 1;
                   commit; end loop; end $$"""
        return [loop]


@dataclass(frozen=True)
class Mixed:
    """Ten tables of ten mixed columns, 20/60/20 insert/update/delete, each in a transaction of its own."""

    name: str
    commits: int

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(f"t{number}" for number in range(10))

    def create(self) -> list[str]:
        made = []
        for table in self.tables:
            made.append(f"create table {table} (id bigint primary key, {_MIXED_COLUMNS})")
            made.append(f"insert into {table} select g, {_mixed_values('g', 30)} from generate_series(1, 10000) g")
        return made

    def write(self) -> list[str]:
        return [
            f"""
            do $$
            declare t text; k bigint;
            begin
              for i in 1 .. {self.commits} loop
                t := 't' || (i % 10);
                k := 1 + (i::bigint * 7919) % 10000;
                if i % 5 = 0 then
                  execute format($i$insert into %I select $1, {_mixed_values("$1", 30)}$i$, t) using 1000000 + i;
                elsif i % 5 = 4 and i > 4 then
                  execute format('delete from %I where id = $1', 't' || ((i - 4) % 10)) using 1000000 + i - 4;
                else
                  execute format('update %I set customer = customer + 1, note = $2 where id = $1', t)
                    using k, 'changed ' || i;
                end if;
                commit;
              end loop;
            end $$
            """
        ]


@dataclass
class Reading:
    """One pass over the backlog. Seconds; CPU seconds by process; `peak_mb`: most resident memory."""

    seconds: float
    walsender_cpu: float
    reader_cpu: float
    driver_cpu: float = 0.0
    reader_peak_mb: float = 0.0
    driver_peak_mb: float = 0.0


def compared(what: str, changes: int, size: int, passes: list[Reading], references: list[Reading]) -> None:
    """The best of our passes beside the best of `pg_recvlogical`; `size`: bytes of the log."""
    best, against = (min(readings, key=lambda r: r.seconds) for readings in (passes, references))
    client, processor, million = "pg_recvlogical", "processor of the", "for a million changes"
    figure(what, changes / best.seconds, "changes/s", client, changes / against.seconds)
    figure(f"{what}: log", size / best.seconds / 1e6, "MB/s", client, size / against.seconds / 1e6)
    theirs = against.reader_cpu / changes * 1e6
    figure(f"{what}: {processor} walsender {million}", best.walsender_cpu / changes * 1e6, "s")
    figure(f"{what}: {processor} reader {million}", best.reader_cpu / changes * 1e6, "s", client, theirs)
    figure(f"{what}: {processor} decoder {million}", best.driver_cpu / changes * 1e6, "s")
    figure(f"{what}: peak memory of the reader", best.reader_peak_mb, "MB")
    figure(f"{what}: peak memory of the decoder", best.driver_peak_mb, "MB")


def cpu(pid: int) -> float | None:
    """CPU seconds of a process (proc(5), "stat"); None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak(pid: int | str) -> float:
    """The most memory that a process has held, in MB, since it began or since `forget_peak`."""
    with open(f"/proc/{pid}/status") as status:
        lines = [line for line in status if line.startswith("VmHWM")]
    return int(lines[0].split()[1]) / 1000


def forget_peak() -> None:
    """This process's peak counts from now on (proc(5), "clear_refs")."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class WalsenderCpu:
    """CPU seconds of the walsender of one slot, which ends with its client: looked at as long as it lives."""

    def __init__(self, source: EmbeddedServer, slot: str) -> None:
        self._source, self._slot = source, slot
        self._pid = 0
        self.seconds = 0.0

    def look(self) -> None:
        if not self._pid:
            query = "select active_pid from pg_replication_slots where slot_name = %s"
            with self._source.connect("postgres") as connection:
                row = connection.execute(query, [self._slot]).fetchone()
            self._pid = (row[0] or 0) if row else 0
        if self._pid:
            self.seconds = cpu(self._pid) or self.seconds


def reference(source: EmbeddedServer, slot: str, end: int, work_mem: str = WORK_MEM) -> Reading:
    """`pg_recvlogical` into nothing, with the options of our connection."""
    environment = {
        **os.environ,
        "PGPASSWORD": (source.folder / "superuser_password").read_text(),
        "PGOPTIONS": f"-c logical_decoding_work_mem={work_mem}",
    }
    command = [
        *(str(source.tool("pg_recvlogical")), "-h", "127.0.0.1", "-p", str(source.port), "-U", "postgres"),
        *("-d", "postgres", "--slot", slot, "--start", "-f", os.devnull, "--endpos", format_lsn(end)),
        *("-o", "proto_version=4", "-o", f"publication_names={','.join(PUBLICATIONS)}"),
        *("-o", "binary=true", "-o", "messages=true", "-o", "streaming=on", "-s", "1"),
    ]
    server_cpu = WalsenderCpu(source, slot)
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    spent = 0.0
    while process.poll() is None:
        server_cpu.look()
        spent = cpu(process.pid) or spent
        time.sleep(0.05)
    if process.wait() != 0:
        raise SystemExit(f"pg_recvlogical failed: {process.stderr.read().decode() if process.stderr else ''}")
    return Reading(time.perf_counter() - started, server_cpu.seconds, spent)


@contextlib.contextmanager
def written(source: EmbeddedServer, backlog: Backlog, slots: list[str]) -> Iterator[tuple[int, int]]:
    """The log of `backlog` behind each of `slots`: where it begins and ends."""
    with source.connect("postgres") as connection:
        connection.execute("set synchronous_commit = off")
        for statement in backlog.create():
            connection.execute(statement)
        connection.execute(f"create publication {PUBLICATIONS[0]} for table {', '.join(backlog.tables)}")
        connection.execute(f"create publication {PUBLICATIONS[1]}")
        for slot in slots:
            connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        start = position(source, "pg_current_wal_insert_lsn()")
        for statement in backlog.write():
            connection.execute(statement)
        connection.execute("set synchronous_commit = on")
        connection.execute("select pg_logical_emit_message(true, 'end', '')")
        end = position(source, "pg_current_wal_flush_lsn()")
    yield start, end
    with source.connect("postgres") as connection:
        for slot in slots:
            connection.execute("select pg_drop_replication_slot(%s)", [slot])
        connection.execute(f"drop table {', '.join(backlog.tables)}")
        for name in PUBLICATIONS:
            connection.execute(f"drop publication {name}")


def position(source: EmbeddedServer, function: str) -> int:
    with source.connect("postgres") as connection:
        row = connection.execute(f"select {function}::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])
