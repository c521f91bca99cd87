"""Whatever the size of a transaction, the reader's memory is bounded: what is open goes to disk, and from it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.jobs import until
from fixtures.log_of import Source, read_to, source_of
from fixtures.postgres import Database
from headwater.errors import Refused
from headwater.replicate.reader.handle import LogReader

pytestmark = pytest.mark.postgres

ROWS = 250_000
LOG_BYTES = 130_000_000
GROWTH = 120 << 20  # 64 MiB of open changes, one run, and what joining a block takes for a moment
FILL = "insert into t select g, repeat('x', 500) from generate_series(%s::bigint, %s::bigint) g"


@pytest.fixture
def source(database: Database) -> Iterator[Source]:
    database.execute("create table t (id bigint primary key, note text)")
    with source_of(database, "t") as made:
        yield made


def peak(reader: LogReader) -> int:
    """The most memory that the process has ever held, in bytes."""
    lines = Path(f"/proc/{reader._process.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def spilled(reader: LogReader) -> int:
    return sum(path.stat().st_size for path in Path(reader._folder.path).iterdir())


def fill(source: Source, first: int, rows: int) -> None:
    with source.database.connect() as connection:
        connection.execute(FILL, [first, first + rows - 1])


def test_a_large_transaction_passes_the_reader_in_bounded_memory(source: Source) -> None:
    with LogReader(source.options()) as reader:
        fill(source, 0, 20_000)
        read_to(reader, source.position())
        before = peak(reader)
        fill(source, 1_000_000, ROWS)
        chunks = read_to(reader, source.position(), 180)
        assert sum(chunk.size for chunk in chunks) > LOG_BYTES
        assert sum(chunk.changes for chunk in chunks) == ROWS
        assert peak(reader) - before < GROWTH
        assert spilled(reader) > LOG_BYTES / 2
        numbers = [number for chunk in chunks for block in chunk.blocks for number in block.sequence.tolist()]
        assert numbers == list(range(numbers[0], numbers[0] + ROWS))
        chunks.clear()
        gc.collect()
        until(lambda: spilled(reader) == 0, "the file is gone")
        folder = reader._folder.path
    assert not Path(folder).exists()


def test_ten_large_open_transactions_of_which_half_abort_pass_in_bounded_memory(source: Source) -> None:
    with LogReader(source.options()) as reader:
        fill(source, 0, 20_000)
        read_to(reader, source.position())
        before = peak(reader)
        writers = [source.database.connect(autocommit=False) for _ in range(10)]
        for part in range(2):
            for number, writer in enumerate(writers):
                first = (1 + number) * 1_000_000 + part * 500_000
                writer.execute(FILL, [first, first + 12_499])
        until(lambda: spilled(reader) > LOG_BYTES / 4, "what is open lies on disk")
        for number, writer in enumerate(writers):
            if number % 2:
                writer.rollback()
            else:
                writer.commit()
            writer.close()
        chunks = read_to(reader, source.position(), 180)
        assert sum(chunk.changes for chunk in chunks) == 5 * 25_000
        assert peak(reader) - before < GROWTH


def test_a_transaction_beyond_the_budget_ends_the_reader_and_can_be_read_again(source: Source) -> None:
    small = replace(source.options(), spill=10 << 20)
    with LogReader(small) as reader:
        fill(source, 0, ROWS)
        until(lambda: reader.ended, "the reader ends", 120)
        with pytest.raises(Refused) as full:
            reader.wait(0)
    assert full.value.code == "spill_full"
    with LogReader(source.options()) as reader:
        assert sum(chunk.changes for chunk in read_to(reader, source.position(), 180)) == ROWS
