"""Which tables a rebuild puts file by file, and what is left to Spark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyroaring import BitMap

from headwater.delta.data_files import write_batches
from headwater.delta.delta_log import DataFile
from headwater.delta.layout import PLAIN
from headwater.delta.small_versions import TableUnreadable
from headwater.reload.stored_rows import PartitionTexts, StoredRows
from headwater.schema import Column, TableSchema, ValueType

INT = ValueType("int4", "int")
SCHEMA = TableSchema(1, "public", "t", (Column("id", 1, 23, -1, INT), Column("day", 2, 23, -1, INT)), ("id",))
KIND = pa.schema([("id", pa.int32()), ("day", pa.int32())])


def file_of(folder: Path, days: list[int]) -> DataFile:
    rows = pa.table([pa.array(np.arange(len(days), dtype=np.int32)), pa.array(days, pa.int32())], schema=KIND)
    return write_batches(str(folder), KIND, [rows], PLAIN)


def stored(folder: Path) -> StoredRows:
    return StoredRows(str(folder), SCHEMA, PLAIN, PartitionTexts("public.t", ()))


def test_rows_of_few_partitions_lie_together_and_those_of_many_do_not_in_whatever_order(tmp_path: Path) -> None:
    few = [file_of(tmp_path, [first + at // 100 for at in range(800)]) for first in range(0, 80, 8)]
    assert stored(tmp_path).lie_together(few, ("day",))
    # A file in the order of its partitions: the first of them has more rows than are read at a time.
    many = file_of(tmp_path, [0] * 200_000 + [1 + at // 10 for at in range(80)])
    assert not stored(tmp_path).lie_together([many], ("day",))
    assert stored(tmp_path).lie_together([many], ())
    assert not stored(tmp_path).lie_together([many, *few], ("day",))


def test_a_file_that_is_gone_is_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    file = file_of(tmp_path, [1, 2])
    (tmp_path / file.name).unlink()
    with pytest.raises(TableUnreadable, match="its Delta table cannot be read"):
        stored(tmp_path).lie_together([file], ("day",))
    with pytest.raises(TableUnreadable, match="its Delta table cannot be read"):
        list(stored(tmp_path)([(file, BitMap())]))
