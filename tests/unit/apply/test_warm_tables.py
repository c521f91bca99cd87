"""Tables read ahead of their turn: whatever another driver commits meanwhile, they are as if read only now."""

from __future__ import annotations

import json
import random
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headwater.apply import direct as positional
from headwater.apply.direct import Fence
from headwater.apply.live_table import LiveTable
from headwater.apply.plan import Plan
from headwater.apply.small_files import Upkeep
from headwater.apply.warm_tables import WarmTables
from headwater.arrow_types import lake_schema
from headwater.delta.index.codes import Codes, encode
from headwater.delta.index.index import NOWHERE
from headwater.delta.tables import current
from headwater.errors import HeadwaterError
from headwater.lake.registry import TableRecord
from headwater.net_changes import NetChanges
from headwater.schema import Column, TableSchema, ValueType

APP = "headwater/shop/public.t/1"
FENCE = Fence("headwater/shop/generation", 1)
SCHEMA = TableSchema(
    1,
    "public",
    "t",
    (
        Column("id", 1, 0, -1, ValueType("int8", "bigint")),
        Column("note", 2, 0, -1, ValueType("text", "string")),
    ),
    ("id",),
)
RECORD = TableRecord("public.t", "public/t", "active", incarnation=1, schemas=((0, SCHEMA),))
KEYS = 200


def _create(folder: Path, *features: str) -> str:
    log = folder / "_delta_log"
    log.mkdir(parents=True)
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in (("id", "long"), ("note", "string"))
    ]
    metadata = {
        "id": "00000000-0000-0000-0000-000000000000",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {"delta.enableDeletionVectors": "true"},
    }
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors", *features],
    }
    actions = [{"protocol": protocol}, {"metaData": metadata}]
    (log / f"{0:020d}.json").write_text("\n".join(json.dumps(action) for action in actions) + "\n")
    return str(folder)


class OtherDriver:
    """Writes the table as a running driver does, upkeep included, and knows which keys are there."""

    def __init__(self, path: str, seed: int = 0) -> None:
        self.state = LiveTable(path, SCHEMA)
        self.path = path
        self.keys: set[int] = set()
        self._chance = random.Random(seed)
        self._upkeep = Upkeep(FENCE)
        self._lsn = self.state.snapshot.transactions.get(APP, 0)

    def batch(self) -> None:
        numbers = self._chance.sample(range(KEYS), 30)
        removed = [key for key in numbers if key in self.keys and self._chance.random() < 0.4]
        put = [key for key in numbers if key not in removed]
        rows = pa.Table.from_pylist([{"id": key, "note": f"at {self._lsn}"} for key in put], schema=lake_schema(SCHEMA))
        changes = NetChanges(
            rows,
            np.array([key in self.keys for key in put], dtype=np.bool_),
            {},
            None,
            pa.table({"id": pa.array(removed, pa.int64())}),
            len(numbers),
        )
        self._lsn += 1
        plan = Plan(RECORD, self.path, APP, self.state.version, self._lsn, changes, "positional", "a test")
        assert positional.apply(self.state, plan, FENCE).divergence == 0
        self.keys = (self.keys - set(removed)) | set(put)
        self._upkeep.after_commit(self.path, self.state, SCHEMA)
        wait(self._upkeep._running.values())  # committed behind the next batch

    def close(self) -> None:
        self._upkeep.close()


def _codes() -> Codes:
    return encode(SCHEMA, pa.table({"id": pa.array(range(KEYS), pa.int64())}))


@pytest.mark.parametrize("seed", range(4))
def test_a_table_that_was_followed_finds_what_one_that_is_read_anew_finds(tmp_path: Path, seed: int) -> None:
    path, chance, warm = _create(tmp_path / "t"), random.Random(seed), WarmTables()
    other = OtherDriver(path, seed)
    for _ in range(60):
        other.batch()
        if chance.random() < 0.3:
            assert warm.follow(RECORD, path, APP) == ""
    assert any("OPTIMIZE" in file.read_text() for file in Path(path, "_delta_log").glob("*.json")), "upkeep took part"
    other.close()
    assert warm.current(path, APP) == current(path, APP)
    state = warm.take_states()[path]
    found = state.find(_codes())
    assert {key for key in range(KEYS) if found[key] != NOWHERE} == other.keys
    fresh = LiveTable(path, SCHEMA)
    assert state.snapshot.files.keys() == fresh.snapshot.files.keys()
    wanted = pa.schema([lake_schema(SCHEMA).field("note")])
    at, again = found[found != NOWHERE], fresh.find(_codes())
    notes, expected = np.empty(len(at), object), np.empty(len(at), object)
    for table, places, into in ((state, at, notes), (fresh, again[again != NOWHERE], expected)):
        for here, rows in table.rows_at(places, wanted):
            into[here] = rows["note"].to_pylist()
    assert list(notes) == list(expected)


def test_where_a_table_stands_is_not_read_again_until_it_has_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, warm, looks = _create(tmp_path / "t"), WarmTables(), list[str]()
    other = OtherDriver(path)
    other.batch()

    def counted(path: str, app_id: str, known: tuple[int, int] | None = None) -> tuple[int, int] | None:
        looks.append(path)
        return current(path, app_id, known)

    monkeypatch.setattr("headwater.apply.warm_tables.current", counted)
    warm.note(path, APP)
    assert warm.current(path, APP) == (1, 1)
    assert len(looks) == 1
    other.batch()
    assert warm.current(path, APP) == (2, 2)
    assert len(looks) == 2
    other.close()


def test_a_table_of_another_incarnation_or_that_is_gone_is_not_taken_for_the_one_that_was_read(tmp_path: Path) -> None:
    path, warm = _create(tmp_path / "t"), WarmTables()
    other = OtherDriver(path)
    other.batch()
    other.close()
    warm.follow(RECORD, path, APP)
    assert warm.current(path, "headwater/shop/public.t/2") == (1, 0)
    assert warm.take_states() == {}
    warm.follow(RECORD, path, APP)
    Path(path).rename(tmp_path / "elsewhere")
    assert warm.current(path, APP) is None


def test_a_table_that_could_not_be_followed_is_forgotten_and_not_half_known(tmp_path: Path) -> None:
    path, warm = _create(tmp_path / "t"), WarmTables()
    other = OtherDriver(path)
    other.batch()
    warm.follow(RECORD, path, APP)
    other.batch()
    other.close()
    newest = max(Path(path).glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
    hidden = newest.rename(tmp_path / "hidden.parquet")
    with pytest.raises((OSError, HeadwaterError)):
        warm.follow(RECORD, path, APP)
    hidden.rename(newest)
    assert warm.current(path, APP) == (2, 2)
    assert warm.take_states() == {}


def test_a_table_that_an_engine_must_write_says_so(tmp_path: Path) -> None:
    path = _create(tmp_path / "t", "rowTracking")
    assert "rowTracking" in WarmTables().follow(RECORD, path, APP)
    assert DeltaTable(path).version() == 0
