"""What contradicts the stored rows: is refused before anything is committed, or repaired."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fixtures.twins import on_disk
from headwater.apply import whole_table
from headwater.apply.applier import Applier
from headwater.apply.direct import Fence
from headwater.apply.plan import Applied, Plan, choose
from headwater.arrow_types import key_schema, lake_schema
from headwater.delta.data_files import read_columns
from headwater.delta.delta_log import read_snapshot
from headwater.errors import Diverged
from headwater.lake.registry import TableRecord
from headwater.net_changes import NetChanges
from headwater.schema import Column, Leaf, TableSchema, ValueType

ID, NOTE = Column("id", 1, 20, -1, ValueType("int8", "bigint")), Column("note", 2, 25, -1, ValueType("text", "string"))
SCHEMA = TableSchema(1, "public", "t", (ID, NOTE), ("id",), (Leaf(1, "public", "t", 0),))


class Lake:
    """A table that one driver writes."""

    def __init__(self, folder: Path, schema: TableSchema, on_divergence: Any) -> None:
        self.folder, self.path, self.schema = folder, str(folder / "t"), schema
        whole_table.create(self.path, schema, 3600.0)
        self.record = TableRecord(
            "public.t", "t", "active", incarnation=1, on_divergence=on_divergence, schemas=((0, schema),)
        )
        self.applier = Applier(lambda: pytest.fail("Spark is asked for"), Fence("headwater/p/generation", 1))
        self.lsn = 100

    def commit(
        self, rows: dict[int, str], stored: list[bool], *, refuses: bool = False, parts: int = 0, **more: Any
    ) -> Applied:
        """The rows, by key, as the net effect of a batch; `stored`: whether the log says that each was there. `parts`:
        in so many on disk."""
        kind = lake_schema(self.schema)
        blank = dict.fromkeys(kind.names)
        marks = {"_hw_deleted": False} if self.schema.soft_delete else {}
        table = pa.Table.from_pylist([{**blank, **marks, "id": k, "note": v} for k, v in rows.items()], schema=kind)
        empty = key_schema(self.schema).empty_table()
        changes = NetChanges(table, np.array(stored, dtype=np.bool_), {}, None, empty, len(stored), **more)
        changes = on_disk(changes, self.folder, parts) if parts else changes
        self.lsn += 100
        path, because = choose(changes, self.schema, "")
        plan = Plan(self.record, self.path, "headwater/p/public.t/1", self.version, self.lsn, changes, path, because)
        return self.applier.commit(replace(plan, refuses_divergence=refuses))

    @property
    def version(self) -> int:
        return read_snapshot(self.path).version

    def files(self) -> list[str]:
        return sorted(str(path) for path in Path(self.path).rglob("*") if path.suffix in (".parquet", ".bin"))

    def rows(self, *, marked: bool = False) -> list[int]:
        """Keys of the rows; `marked`: of those that are marked as deleted."""
        kind, files = lake_schema(self.schema), read_snapshot(self.path).files.values()
        rows = [row for file in files for row in read_columns(self.path, file, kind).to_pylist()]
        return sorted(row["id"] for row in rows if bool(row.get("_hw_deleted")) == marked)


def test_where_divergence_suspends_nothing_is_committed_that_a_kill_could_leave_unjudged(tmp_path: Path) -> None:
    lake = Lake(tmp_path, SCHEMA, "suspend")
    lake.commit({1: "a", 3: "c"}, [False, False], refuses=True)
    before = lake.version, lake.files()
    with pytest.raises(Diverged, match=r"1 rows of the log contradict the lake .*update met no row at key \(2\)"):
        lake.commit({1: "b", 2: "b"}, [True, True], refuses=True)
    assert (lake.version, lake.files()) == before
    assert lake.commit({1: "b", 3: "b"}, [True, True], refuses=True).divergence == 0, "the table can be written on"


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("policy", ["repair", "report"])
def test_a_row_that_an_emptied_table_with_its_deleted_rows_lacked_is_written_where_that_is_repaired(
    tmp_path: Path, policy: str, parts: int
) -> None:
    """The log updates rows that the lake does not have, one of them marked as deleted, truncates, and puts them
    again."""
    lake = Lake(tmp_path, replace(SCHEMA, soft_delete=True), policy)
    emptied: dict[str, Any] = {"truncated_leaves": (1,), "emptied": {1: (200, 0)}}
    lake.commit({1: "a", 3: "c", 5: "e"}, [False, False, False])
    lake.commit({3: "c", 5: "e"}, [False, False], **emptied)
    assert (lake.rows(), lake.rows(marked=True)) == ([3, 5], [1])
    done = lake.commit({1: "b", 2: "b", 3: "d", 4: "d"}, [True, True, True, False], parts=parts, **emptied)
    assert done.divergence == 2
    repaired = [1, 2] if policy == "repair" else []
    assert lake.rows() == [*repaired, 3, 4]
    assert lake.rows(marked=True) == sorted({1, 5} - set(repaired)), "no key has two rows"
